"""dLoRA's policy, for comparison: requests go to the least loaded node, and some migrate later.

Waiting requests migrate first, from the most loaded node to the least loaded one. A running request migrates only where
the difference in load is large. Its KV cache is not sent, so the target node recomputes its prompt and its tokens. Each
request migrates at most once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from gateway.scheduling.baselines import MostIdle

PERIOD_S = 1.0
MIN_GAP, RUNNING_GAP = 2, 6
"""Minimum difference between two nodes' numbers of requests at which a waiting request, or a running one, migrates."""


class MovableRequest(NamedTuple):
    """Request that has not been migrated yet."""

    id: str
    row: int
    runs: bool
    tokens: int
    """Number of prompt and generated tokens, which a migration would recompute."""


class Move(NamedTuple):
    id: str
    row: int


@runtime_checkable
class Migrates(Protocol):
    """Policy that migrates requests. The gateway and the simulator call it the same way."""

    period: float

    def moves(self, loads: Mapping[int, float], requests: Sequence[MovableRequest]) -> list[Move]:
        """Returns the migrations to make, at most one per request.

        `loads`: number of requests on each serving node, by its row. `requests`: in order of arrival.
        """
        ...


class Dlora(MostIdle):
    period = PERIOD_S

    def moves(self, loads: Mapping[int, float], requests: Sequence[MovableRequest]) -> list[Move]:
        loads, moves = dict(loads), []
        movable: dict[int, list[MovableRequest]] = {row: [] for row in loads}
        for request in requests:
            movable.get(request.row, []).append(request)
        for _ in range(len(loads)):  # at most this many moves
            busiest, idlest = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
            chosen = _movable(movable[busiest], loads[busiest] - loads[idlest])
            if chosen is None:
                break
            movable[busiest].remove(chosen)
            moves.append(Move(chosen.id, idlest))
            loads[busiest] -= 1
            loads[idlest] += 1
        return moves


def _movable(requests: Sequence[MovableRequest], gap: float) -> MovableRequest | None:
    """Returns the latest waiting request, else the running one with the fewest tokens; None if `gap` is too small."""
    if gap < MIN_GAP:
        return None
    waiting = next((request for request in reversed(requests) if not request.runs), None)
    if waiting is not None or gap < RUNNING_GAP:
        return waiting
    return min(requests, key=lambda request: request.tokens, default=None)
