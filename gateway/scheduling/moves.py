"""What a policy that moves requests after they were placed is told, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Movable(NamedTuple):
    """A request that has not been moved yet."""

    id: str
    row: int
    """of the node that has it"""
    runs: bool
    """it has left the node's queue"""
    tokens: int
    """of its prompt, and generated: what a move would have computed again"""


class Move(NamedTuple):
    id: str
    row: int
    """of the node that is to have the request"""


@runtime_checkable
class Migrates(Protocol):
    """A policy that moves requests. The gateway and the simulator call it the same way."""

    period: float
    """Seconds from one time to the next."""

    def moves(self, loads: Mapping[int, float], requests: Sequence[Movable]) -> list[Move]:
        """Return which requests to move, each once at most. `loads`: requests on each node that serves, by its row;
        `requests` in the order in which they came."""
        ...
