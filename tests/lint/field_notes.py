"""Counts the notes under fields of classes at commits, by package, as JSON.

python -m tests.lint.field_notes COMMIT...
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys

from tests.lint.words import PACKAGES, ROOT


def field_notes(source: str) -> int:
    """Returns the number of strings that follow an annotated or assigned field in the body of a class."""
    count = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            for field, note in zip(node.body, node.body[1:], strict=False):
                value = note.value if isinstance(note, ast.Expr) else None
                is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                count += is_text and isinstance(field, (ast.Assign, ast.AnnAssign))
    return count


def count_at(commit: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for package in PACKAGES:
        files = _git("ls-tree", "-r", "--name-only", commit, "--", f"{package}/").splitlines()
        sources = (_git("show", f"{commit}:{file}") for file in files if file.endswith(".py"))
        counts[package] = sum(field_notes(source) for source in sources)
    return counts


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(json.dumps({commit: count_at(commit) for commit in sys.argv[1:]}, indent=1))
