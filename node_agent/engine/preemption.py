"""Which best-effort requests give their places to a strict one. They are computed again later (`Engine` says how)."""

from __future__ import annotations

from collections.abc import Iterable

from node_agent.engine.request import Request
from node_agent.engine.reserves import Room

MOST_PREEMPTIONS = 3
"""Of one request; after so many it keeps its place."""


def choose_victims(running: Iterable[Request], short: Room) -> list[Request] | None:
    """Those that free the rows and KV blocks of which the batch is short: of the least often preempted the latest
    admitted first, for they have the least to compute again. None: all together would not free enough."""
    victims: list[Request] = []
    rows, blocks = short.rows, short.blocks
    for request in sorted(filter(_may_go, running), key=lambda request: (request.preemptions, -request.admitted)):
        if rows <= 0 and blocks <= 0:
            break
        if rows > 0 or request.blocks:
            victims.append(request)
            rows, blocks = rows - 1, blocks - len(request.blocks)
    return victims if rows <= 0 and blocks <= 0 else None


def _may_go(request: Request) -> bool:
    """Nothing that is under way on the device may still write to its blocks."""
    if request.in_cold_pass or request.in_hot_pass:
        return False
    return request.slo_class == "best_effort" and request.preemptions < MOST_PREEMPTIONS
