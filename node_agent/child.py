"""Start of a child process: its settings, its output, and its exit with its parent."""

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
    """Returns the settings that the parent wrote to standard input. Raises msgspec.DecodeError unless they are of type
    `kind`."""
    return msgspec.json.decode(sys.stdin.buffer.read(), type=kind)


def take_output() -> Callable[[msgspec.Struct], None]:
    """Reserves standard output for messages, and redirects other output (of libraries) to standard error. Returns a
    function that writes a message as one line of JSON."""
    report = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(message: msgspec.Struct) -> None:
        report.write(msgspec.json.encode(message) + b"\n")

    return write
