"""Counts the lines of code of the packages at commits, without docstrings, comments and blank lines, as JSON.

python -m tests.lint.code_lines COMMIT...
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from pathlib import Path

from tests.lint.words import PACKAGES, ROOT

SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                prose |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SKIPPED:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def count(commit: str) -> dict[str, int]:
    """Returns the lines of code by package, and under `all_lines` those of all packages with everything."""
    result = {"all_lines": 0}
    for package in PACKAGES:
        files = _git("ls-tree", "-r", "--name-only", commit, package).split()
        sources = [_git("show", f"{commit}:{file}") for file in files if Path(file).suffix == ".py"]
        result[package] = sum(map(code_lines, sources))
        result["all_lines"] += sum(source.count("\n") for source in sources)
    return result


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    print(json.dumps({commit: count(commit) for commit in sys.argv[1:]}, indent=1))


if __name__ == "__main__":
    main()
