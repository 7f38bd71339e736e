"""The command line on a terminal of 80 and of 120 columns, and in a pipe, against a running gateway."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from running_gateway import Running, upload

STYLE = re.compile(r"\x1b\[[0-9;]*m")
LONG_NAME = "a-function-with-a-name-as-long-as-they-may-be-0123456789-abcdef"
COMMANDS = (
    *(("list",), ("describe", LONG_NAME), ("nodes",)),
    *(("usage",), ("usage", "--all-tenants", "--group-by", "tenant,function,version,hour")),
    *(("alias", LONG_NAME, "prod"), ("explain", "mine")),
)


@pytest.fixture
def busy(gateway: Running, stories_adapters: dict[str, Path]) -> Running:
    """With a function of two versions, an alias that moved, and a call."""
    client = gateway.client()
    for adapter in ("pirate", "dragon"):
        client.post(f"/deploy/{LONG_NAME}", files=upload(stories_adapters[adapter])).raise_for_status()
    for target in ({"version": 1}, {"weights": {"1": 0.5, "2": 0.5}}):
        client.put(f"/functions/{LONG_NAME}/aliases/prod", json=target).raise_for_status()
    body = {"prompt": "x", "max_tokens": 2}
    client.post(f"/invoke/{LONG_NAME}", json=body, headers={"x-request-id": "mine"}).raise_for_status()
    return gateway


def command(gateway: Running, folder: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    key = "admin" if {"nodes", "--all-tenants"} & set(arguments) else "acme"
    environment = {**os.environ, "GARNISH_URL": gateway.url, "GARNISH_API_KEY": gateway.keys[key]}
    environment |= {"TERM": "xterm-256color", "XDG_CONFIG_HOME": str(folder)}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    return {"args": [sys.executable, "-m", "garnish.cli.main", *arguments], "cwd": folder, "env": environment}


def on_a_terminal(columns: int, process: dict[str, Any]) -> list[str]:
    """The lines that a terminal of so many columns is sent, without styles."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen(**process, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the terminal's other side was closed
                break
            if not piece:
                break
            shown += piece
        assert child.wait(60) == 0, shown.decode()
    os.close(ours)
    return [line.rstrip() for line in STYLE.sub("", shown.decode()).splitlines()]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments)[:30])
def test_tables_fit(busy: Running, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    process = command(busy, tmp_path, arguments)
    piped = subprocess.run(**process, capture_output=True, text=True, timeout=60).stdout.splitlines()
    (at,) = [number for number, line in enumerate(piped) if re.fullmatch(r"\*?[A-Z/\t ]+", line)]
    table = [line.split("\t") for line in piped[at:] if "\t" in line]
    assert len({len(row) for row in table}) == 1, "each row has a field per column"
    process["args"] += ["--no-header"]
    bare = subprocess.run(**process, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert bare[:at] == piped[:at] and len(bare) == len(piped) - 1
    process["args"].pop()
    for columns in (80, 120):
        lines = on_a_terminal(columns, process)
        first = next(line for line in lines if table[0][0] + " " in line + " " and table[0][1] in line)
        within = [line for line in lines[lines.index(first) :] if not line.startswith("left out")]
        assert max(map(len, within)) <= columns
        shown = "".join(within).replace(" ", "")
        assert all(len(row[0]) == 64 or row[0].replace(" ", "")[:12] in shown for row in table), "every row is there"


def test_sizes_are_for_people(busy: Running, tmp_path: Path) -> None:
    process = command(busy, tmp_path, ("list", "--json"))
    raw = subprocess.run(**process, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r'"bytes":\d{4,}', raw)
    process["args"].pop()
    assert re.search(
        r"\t\d+(\.\d)? KiB\t", subprocess.run(**process, capture_output=True, text=True, timeout=60).stdout
    )


def test_a_version_is_deleted_by_its_name(busy: Running, tmp_path: Path) -> None:
    done = subprocess.run(
        **command(busy, tmp_path, ("delete", f"{LONG_NAME}:1")), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("garnish: conflict: version 1 is in use by the alias")
    assert f"(garnish alias {LONG_NAME} ALIAS VERSION)" in done.stderr
