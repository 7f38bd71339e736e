"""Which best-effort requests give their places to a strict one. They are computed again later (`Engine` says how)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from cluster.messages import StrictRoom
from node_agent.engine.request import Request
from node_agent.engine.reserves import Room
from node_agent.engine.waiting import WaitingQueue

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


def strict_room(running: Collection[Request], queue: WaitingQueue, kept: Room, free: Room) -> StrictRoom:
    """What a strict request would find that came now. `kept`: for such ones. While a standard request waits, they get
    no more of what is free (`Admission`)."""
    if queue.standard:
        free = Room(min(free.rows, kept.rows), min(free.blocks, kept.blocks))
    giving = [request for request in running if _may_go(request)]
    strict = [request for request in running if request.slo_class == "strict"]
    return StrictRoom(
        rows=free.rows + len(giving),
        blocks=free.blocks + sum(len(request.blocks) for request in giving),
        prompt_tokens=sum(max(0, request.prompt_len - request.computed) for request in strict),
    )


def choose_lenders(running: Iterable[Request], fits: Callable[[Collection[str]], bool]) -> list[Request] | None:
    """Those that hold adapters whose room on the device would do (`fits` is told their digests): of the least often
    preempted the latest admitted first. An adapter that others use, too, frees nothing. None: all would not do."""
    users: dict[str, list[Request]] = {}
    for request in running:
        if request.lease is not None:
            users.setdefault(request.lease.digest, []).append(request)
    idle_then = [(digest, those) for digest, those in users.items() if all(map(_may_go, those))]
    idle_then.sort(key=lambda found: max((request.preemptions, -request.admitted) for request in found[1]))
    for count in range(1, len(idle_then) + 1):
        if fits([digest for digest, _ in idle_then[:count]]):
            return [request for _, those in idle_then[:count] for request in those]
    return None


def _may_go(request: Request) -> bool:
    """Nothing that is under way on the device may still write to its blocks."""
    if request.in_cold_pass or request.in_hot_pass:
        return False
    return request.slo_class == "best_effort" and request.preemptions < MOST_PREEMPTIONS
