"""How a child process of the supervisor begins: it dies with its parent and reads its settings from standard input."""

from __future__ import annotations

import sys
from typing import TypeVar

import msgspec

from cluster.lifeline import die_with_parent

__all__ = ["die_with_parent", "read_config"]

Config = TypeVar("Config")


def read_config(kind: type[Config]) -> Config:
    """The settings that the supervisor wrote on standard input. Raises msgspec.DecodeError when they are not `kind`."""
    return msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
