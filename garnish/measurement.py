"""Runs the measurement of a node in a process of its own, and follows what it says."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from garnish.errors import FrontDoorError
from node_agent.config import EngineConfig, ProfileProcessConfig

COMMAND = (sys.executable, "-m", "node_agent.profile_process")
LONGEST_STEP = 1800.0
"""Seconds without a word after which the measurement counts as stuck: a large base on few cores takes its time."""


def run_measurement(
    config: EngineConfig,
    step: Callable[[str, float | None], None],
    command: Sequence[str] = COMMAND,
    patience: float = LONGEST_STEP,
) -> dict[str, Any]:
    """The cold-start profile (`cold_start`) and the performance model (`performance`), which the process has also
    written to `config.profile` and beside it; `step` is told what is being done, and which share of it is done.

    The process ends with this call, however that ends, and with this process. Raises FrontDoorError.
    """
    settings = msgspec.json.encode(ProfileProcessConfig(parent=os.getpid(), engine=config))
    # A process group of its own: Ctrl-C reaches this process, which ends the other one.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as stream:  # it ended at once: its output does
                stream.write(settings)
            for line in _lines(process.stdout.fileno(), patience):
                message = msgspec.json.decode(line)
                if message.get("type") == "step":
                    step(message["text"], message.get("share"))
                elif message.get("type") == "failed":
                    raise FrontDoorError(f"the node can't be measured: {message['message']}")
                else:
                    message.pop("type", None)
                    return dict(message)
        finally:
            process.kill()
    raise FrontDoorError("the measuring process ended before it was done; its log is above")


def _lines(fd: int, patience: float) -> Iterator[bytes]:
    """Whole lines until the end of the output. Raises FrontDoorError after `patience` seconds of silence."""
    begun = b""
    while True:
        if not select.select([fd], [], [], patience)[0]:
            raise FrontDoorError(f"the measurement said nothing for {patience:g} s and was ended")
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return
        *lines, begun = (begun + chunk).split(b"\n")
        yield from lines
