"""dLoRA's policy, for comparison: requests go to the least loaded node, and now and then some move to one with less.

Waiting requests move first. A running one moves only where the difference is large; its KV memory is not sent, so that
its prompt and its tokens are computed again where it arrives. Each request moves once at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from gateway.scheduling.baselines import MostIdle

PERIOD = 1.0
"""Seconds."""
MIN_GAP, RUNNING_GAP = 2, 6
"""Requests that one node must have more than another for a waiting one, or a running one, to move."""


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


class Dlora(MostIdle):
    period = PERIOD

    def moves(self, loads: Mapping[int, float], requests: Sequence[Movable]) -> list[Move]:
        loads, moves = dict(loads), []
        movable: dict[int, list[Movable]] = {row: [] for row in loads}
        for request in requests:
            movable.get(request.row, []).append(request)
        for _ in range(len(loads)):  # as many moves at most
            busiest, idlest = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
            chosen = _movable(movable[busiest], loads[busiest] - loads[idlest])
            if chosen is None:
                break
            movable[busiest].remove(chosen)
            moves.append(Move(chosen.id, idlest))
            loads[busiest] -= 1
            loads[idlest] += 1
        return moves


def _movable(requests: Sequence[Movable], gap: float) -> Movable | None:
    """Returns the waiting request that came last, else the running one that has computed least.

    None when the gap is too small for any."""
    if gap < MIN_GAP:
        return None
    waiting = next((request for request in reversed(requests) if not request.runs), None)
    if waiting is not None or gap < RUNNING_GAP:
        return waiting
    return min(requests, key=lambda request: request.tokens, default=None)
