"""dLoRA's way, for comparison: requests go to the least loaded node, and every while some move to one with less.

Waiting requests move first. A running one moves only where the difference is large; its KV memory is not sent, so that
its prompt and its tokens are computed again where it arrives. Each request moves once at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.scheduling.baselines import MostIdle
from gateway.scheduling.moves import Movable, Move

PERIOD = 1.0
"""Seconds."""
LEAST_GAP, RUNNING_GAP = 2, 6
"""Requests that one node must have more than another for a waiting one, or a running one, to move."""


class Dlora(MostIdle):
    period = PERIOD

    def moves(self, loads: Mapping[int, float], requests: Sequence[Movable]) -> list[Move]:
        loads, found = dict(loads), []
        left: dict[int, list[Movable]] = {row: [] for row in loads}
        for request in requests:
            left.get(request.row, []).append(request)
        for _ in range(len(loads)):  # as many moves at most
            most, least = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
            chosen = _movable(left[most], loads[most] - loads[least])
            if chosen is None:
                break
            left[most].remove(chosen)
            found.append(Move(chosen.id, least))
            loads[most] -= 1
            loads[least] += 1
        return found


def _movable(requests: Sequence[Movable], gap: float) -> Movable | None:
    """Returns the request that came last of those that wait, or the running one that has computed least; None when
    the gap is too small for any."""
    if gap < LEAST_GAP:
        return None
    waiting = next((request for request in reversed(requests) if not request.runs), None)
    if waiting is not None or gap < RUNNING_GAP:
        return waiting
    return min(requests, key=lambda request: request.tokens, default=None)
