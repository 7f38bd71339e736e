"""Start of a child process: it dies with its parent, reads its settings from standard input, and may report on standard
output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from cluster.lifeline import die_with_parent

__all__ = ["die_with_parent", "read_config", "take_output"]

Config = TypeVar("Config")


def read_config(kind: type[Config]) -> Config:
    """Returns the settings that the supervisor wrote on standard input. Raises msgspec.DecodeError when they are not
    `kind`."""
    return msgspec.json.decode(sys.stdin.buffer.read(), type=kind)


def take_output() -> Callable[[msgspec.Struct], None]:
    """Takes standard output for messages alone; whatever a library prints goes to standard error from here on. Returns
    what writes a message as one line of JSON."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(message: msgspec.Struct) -> None:
        report.write(msgspec.json.encode(message) + b"\n")

    return write
