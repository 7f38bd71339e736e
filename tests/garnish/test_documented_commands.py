"""Every `garnish ...` line of the pages' shell blocks is one that the command line understands."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from garnish.cli.main import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\.venv/bin/)?garnish (.+)$", re.MULTILINE)


def documented() -> list[tuple[str, str]]:
    """(page, arguments) of each."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        (page.name, found)
        for page in pages
        for block in BLOCK.findall(page.read_text())
        for found in COMMAND.findall(block.replace("\\\n", " "))
    ]


@cache
def garnish() -> Any:
    """The whole command line; it takes longer to make than to parse a line."""
    return typer.main.get_command(app)


@pytest.mark.parametrize(("page", "line"), documented())
def test_it_is_understood(page: str, line: str) -> None:
    """Parsed to the end, not run."""
    command, arguments = garnish(), shlex.split(line, comments=True)
    context = typer.Context(command)
    while isinstance(command, TyperGroup) and arguments:
        found = command.get_command(context, arguments[0])
        assert found is not None, f"there is no command {arguments[0]}"
        command, arguments = found, arguments[1:]
    command.make_context(command.name, arguments)


def test_pages_are_found() -> None:
    assert {"README.md", "quickstart.md", "versions.md"} <= {page for page, _ in documented()}


def test_others_are_refused() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_it_is_understood("", "deploy mine ./adapter --no-such-option")
    with pytest.raises(AssertionError, match="no command"):
        test_it_is_understood("", "registry no-such-command")
