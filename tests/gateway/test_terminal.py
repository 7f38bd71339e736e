"""The command line on a terminal of 80 and of 120 columns, and in a pipe, against a running gateway."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from running_gateway import Running, upload

STYLE = re.compile(r"\x1b\[[0-9;]*m")
LONG_NAME = "a-function-with-a-name-as-long-as-they-may-be-0123456789-abcdef"
COMMANDS = (
    *(("list",), ("describe", LONG_NAME), ("nodes",)),
    *(("usage",), ("usage", "--all-tenants", "--group-by", "tenant,function,version,hour")),
    *(("alias", LONG_NAME, "prod"), ("explain", "mine")),
)


@pytest.fixture(scope="module")
def busy(shared_gateway: Running, stories_adapters: dict[str, Path]) -> Running:
    """With a function of two versions, an alias that moved, and a call."""
    client = shared_gateway.client()
    for adapter in ("pirate", "dragon"):
        client.post(f"/deploy/{LONG_NAME}", files=upload(stories_adapters[adapter])).raise_for_status()
    for target in ({"version": 1}, {"weights": {"1": 0.5, "2": 0.5}}):
        client.put(f"/functions/{LONG_NAME}/aliases/prod", json=target).raise_for_status()
    body = {"prompt": "x", "max_tokens": 2}
    client.post(f"/invoke/{LONG_NAME}", json=body, headers={"x-request-id": "mine"}).raise_for_status()
    return shared_gateway


class Person:
    """Who calls the command line, and looks at what it says."""

    def __init__(self, command_line: CommandLine, gateway: Running, folder: Path) -> None:
        self._command_line, self._gateway, self._folder = command_line, gateway, folder

    def _where(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        key = "admin" if {"nodes", "--all-tenants"} & set(arguments) else "acme"
        environment = {**os.environ, "GARNISH_URL": self._gateway.url, "GARNISH_API_KEY": self._gateway.keys[key]}
        environment |= {"TERM": "xterm-256color", "XDG_CONFIG_HOME": str(self._folder)}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        return {"folder": self._folder, "environment": environment}

    def in_a_pipe(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._command_line.run(*arguments, **self._where(arguments))

    def on_a_terminal(self, columns: int, *arguments: str) -> list[str]:
        """The lines that a terminal of so many columns is sent, without styles."""
        done = self._command_line.show(*arguments, **self._where(arguments), columns=columns)
        assert done.returncode == 0, done.stdout
        return [line.rstrip() for line in STYLE.sub("", done.stdout).splitlines()]


@pytest.fixture
def person(command_line: CommandLine, busy: Running, tmp_path: Path) -> Person:
    return Person(command_line, busy, tmp_path)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments)[:30])
def test_tables_fit(person: Person, arguments: tuple[str, ...]) -> None:
    piped = person.in_a_pipe(*arguments).stdout.splitlines()
    (at,) = [number for number, line in enumerate(piped) if re.fullmatch(r"\*?[A-Z/\t ]+", line)]
    table = [line.split("\t") for line in piped[at:] if "\t" in line]
    assert len({len(row) for row in table}) == 1, "each row has a field per column"
    bare = person.in_a_pipe(*arguments, "--no-header").stdout.splitlines()
    assert bare[:at] == piped[:at] and len(bare) == len(piped) - 1
    for columns in (80, 120):
        lines = person.on_a_terminal(columns, *arguments)
        first = next(line for line in lines if table[0][0] + " " in line + " " and table[0][1] in line)
        within = [line for line in lines[lines.index(first) :] if not line.startswith("left out")]
        assert max(map(len, within)) <= columns
        shown = "".join(within).replace(" ", "")
        assert all(len(row[0]) == 64 or row[0].replace(" ", "")[:12] in shown for row in table), "every row is there"


def test_sizes_are_for_people(person: Person) -> None:
    assert re.search(r'"bytes":\d{4,}', person.in_a_pipe("list", "--json").stdout)
    assert re.search(r"\t\d+(\.\d)? KiB\t", person.in_a_pipe("list").stdout)


def test_a_version_is_deleted_by_its_name(person: Person) -> None:
    done = person.in_a_pipe("delete", f"{LONG_NAME}:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("garnish: conflict: version 1 is in use by the alias")
    assert f"(garnish alias {LONG_NAME} ALIAS VERSION)" in done.stderr
