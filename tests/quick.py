"""Selects the tests of `make test-quick`: half of all tests, those that start no process and no server.
Their imports and their fixtures show it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STARTERS = {"multiprocessing", "schemathesis", "subprocess", "uvicorn"}
"""Modules that tests import which start processes or servers."""
FIXTURES = {"aws_mirror", "s3_endpoint", "shared_redis", "smollm_dir", "stories_dir"}
PARAMETERS = {"redis", "s3"}
"""Of tests and fixtures that get one of these fixtures by its name."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process and no server")


def is_left_out(file: Path, config: pytest.Config) -> bool:
    return bool(config.getoption("quick")) and file.suffix == ".py" and starts(file)


def deselect(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave the quick ones in `items`, if these are asked for."""
    if not config.getoption("quick"):
        return
    left_out = [item for item in items if not _is_quick(item)]
    items[:] = [item for item in items if _is_quick(item)]
    config.hook.pytest_deselected(items=left_out)


def _is_quick(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    given = {value for value in params if isinstance(value, str)}
    return FIXTURES.isdisjoint(item.fixturenames) and PARAMETERS.isdisjoint(given)


@cache
def starts(file: Path) -> bool:
    """Whether the file, a module that it imports, or a test's helper that it imports in turn, imports a starter."""
    found = _imports(file)
    if any(name.partition(".")[0] in STARTERS for name in found):
        return True
    files = [path for name in found if (path := _file_of(name, file.parent)) is not None]
    return any(starts(path) if path.is_relative_to(ROOT / "tests") else _is_starter(path) for path in files)


def _is_starter(file: Path) -> bool:
    return any(name.partition(".")[0] in STARTERS for name in _imports(file))


@cache
def _imports(file: Path) -> frozenset[str]:
    """Names of modules, also of those that only functions import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _file_of(module: str, folder: Path) -> Path | None:
    """Of this repository; pytest puts a test's folder on the path."""
    inside = Path(*module.split("."))
    for path in (folder / inside, ROOT / inside):
        if path.with_suffix(".py").is_file():
            return path.with_suffix(".py")
    return None
