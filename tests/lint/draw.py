"""Draws docstrings, notes and names of packages, for readers who judge them (docs/design/decisions/plain-words.md).

python -m tests.lint.draw SEED COUNT PACKAGE...
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yields (place, documented line of code, text) for each docstring and each note under an attribute."""
    source = file.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for index, statement in enumerate(body if isinstance(body, list) else ()):
            value = statement.value if isinstance(statement, ast.Expr) else None
            if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            if index > 0:
                documented = lines[body[index - 1].lineno - 1]
            elif isinstance(node, DOCUMENTED):
                documented = "module" if isinstance(node, ast.Module) else lines[node.lineno - 1]
            else:
                continue
            yield f"{file.relative_to(ROOT)}:{statement.lineno}", documented.strip(), value.value.strip()


def names(file: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, first line) for each class and function."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED[1:]) and not node.name.startswith("__"):
            yield f"{file.relative_to(ROOT)}:{node.lineno}", source.splitlines()[node.lineno - 1].strip()


def main() -> None:
    seed, count, *packages = sys.argv[1:]
    files = [file for package in packages for file in sorted((ROOT / package).rglob("*.py"))]
    rng = random.Random(int(seed))
    for place, line, text in rng.sample([each for file in files for each in docstrings(file)], int(count)):
        print(f"{place}\n  [{line}]\n  {text}")
    for place, line in rng.sample([each for file in files for each in names(file)], int(count)):
        print(f"{place}: {line}")


if __name__ == "__main__":
    main()
