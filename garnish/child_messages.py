"""Runs a child process that reads settings from standard input and writes JSON objects, one per line."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from garnish.errors import FrontDoorError
from node_agent.cores import SPIN_LIMIT


def child_messages(
    command: Sequence[str],
    settings: msgspec.Struct,
    *,
    doing: str,
    patience: float,
    variables: Mapping[str, str] | None = None,
) -> Generator[dict[str, Any], None, None]:
    """Starts the process with `settings` on its standard input, and yields the objects that it writes.

    The child ends when the iteration or this process ends. `doing` names the work in error messages.
    `variables`: further environment variables of the child. Raises FrontDoorError if the child can't be started, or
    writes nothing for `patience` seconds.
    """
    # The child has a separate process group: Ctrl-C reaches only this process, which then ends the child.
    pipes, environment = subprocess.PIPE, SPIN_LIMIT | os.environ  # its threads spin no longer than a node's do
    try:
        started = subprocess.Popen(
            command, stdin=pipes, stdout=pipes, process_group=0, env=environment | dict(variables or {})
        )
    except OSError as error:
        raise FrontDoorError(f"{doing}: {command[0]} can't be run: {error.strerror or error}") from None
    with started as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as stream:  # its output has the reason
                stream.write(msgspec.json.encode(settings))
            for line in _lines(process.stdout.fileno(), doing, patience):
                yield msgspec.json.decode(line)
        finally:
            process.kill()


def _lines(fd: int, doing: str, patience: float) -> Iterator[bytes]:
    """Yields complete lines of the pipe `fd` until it is closed.

    Raises FrontDoorError if nothing is written for `patience` seconds.
    """
    partial_line = b""
    while True:
        if not select.select([fd], [], [], patience)[0]:
            raise FrontDoorError(f"{doing} wrote nothing for {patience:g} s and was ended")
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return
        *lines, partial_line = (partial_line + chunk).split(b"\n")
        yield from lines
