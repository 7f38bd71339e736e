"""Runs a child process that gets its settings on standard input and writes JSON objects, one per line."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import msgspec

from garnish.errors import FrontDoorError
from node_agent.cores import SPIN_LIMIT


def child_messages(
    command: Sequence[str], settings: msgspec.Struct, *, doing: str, patience: float
) -> Generator[dict[str, Any], None, None]:
    """Starts the process with `settings` on its standard input, and yields the objects that it writes.

    The process ends with the iteration, and with this process. `doing` names the work in errors. Raises FrontDoorError
    after `patience` seconds of silence.
    """
    # A process group of its own: Ctrl-C reaches this process, which ends the other one.
    pipes, environment = subprocess.PIPE, SPIN_LIMIT | os.environ  # its threads wait as a node's do
    with subprocess.Popen(command, stdin=pipes, stdout=pipes, process_group=0, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as stream:  # it ended at once: its output does
                stream.write(msgspec.json.encode(settings))
            for line in _lines(process.stdout.fileno(), doing, patience):
                yield msgspec.json.decode(line)
        finally:
            process.kill()


def _lines(fd: int, doing: str, patience: float) -> Iterator[bytes]:
    """Yields complete lines until the output ends. Raises FrontDoorError after `patience` seconds of silence."""
    partial_line = b""
    while True:
        if not select.select([fd], [], [], patience)[0]:
            raise FrontDoorError(f"{doing} said nothing for {patience:g} s and was ended")
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return
        *lines, partial_line = (partial_line + chunk).split(b"\n")
        yield from lines
