"""Choice of requests that give their places to another: best-effort ones to a strict one, and those of tenants with
more than their share to the first one of a tenant that was idle. They are computed again later (`Engine` says how)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from cluster.messages import SloClass
from cluster.news import StrictRoom
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.request import Request
from node_agent.engine.reserves import Room
from node_agent.engine.waiting import WaitingQueue

MAX_PREEMPTIONS = 3
"""Preemptions after which a request keeps its place."""


def choose_victims(
    running: Iterable[Request],
    short: Room,
    pool: BlockPool,
    cached: Collection[int],
    over_share: OverShare | None = None,
) -> list[Request] | None:
    """Returns the requests that free the rows and KV blocks of which the batch is `short`. Blocks that are `cached` do
    not count, for the request that wants the room begins with them. Of the least often preempted the latest admitted go
    first, for they have the least to compute again. `over_share` (None: best effort gives) is asked of each in this
    order. Returns None where all together would not free enough."""
    victims: list[Request] = []
    rows, blocks = short.rows, short.blocks
    freed = Counter[int]()
    for request in sorted(running, key=lambda request: (request.preemptions, -request.admitted)):
        if rows <= 0 and blocks <= 0:
            break
        may_go = _may_go(request) if over_share is None else over_share.may_go(request)
        if may_go and (rows > 0 or request.blocks):
            victims.append(request)
            if over_share is not None:
                over_share.remove(request)
            rows -= 1
            blocks -= pool.let_go(freed, [block for block in request.blocks if block not in cached])
    return victims if rows <= 0 and blocks <= 0 else None


class OverShare:
    """Rows and KV blocks of each tenant, less those of victims: nobody is left with less than the share, or with no
    row. No strict request goes, and for best effort only such."""

    def __init__(self, running: Collection[Request], share: Room, slo_class: SloClass) -> None:
        self._share, self._slo_class = share, slo_class
        self._rows = Counter(request.tenant for request in running)
        self._blocks: Counter[str] = Counter()
        for request in running:
            self._blocks[request.tenant] += len(request.blocks)

    def may_go(self, request: Request) -> bool:
        """Returns whether the request is one of a tenant that has more than its share."""
        tenant, needed = request.tenant, ("strict", "standard") if self._slo_class == "best_effort" else ("strict",)
        rows, blocks = self._rows[tenant], self._blocks[tenant]
        over = rows > self._share.rows or (rows > 1 and blocks - len(request.blocks) >= self._share.blocks)
        return over and request.slo_class not in needed and _is_movable(request)

    def remove(self, request: Request) -> None:
        """Takes what the request holds from its tenant's count: it goes."""
        self._rows[request.tenant] -= 1
        self._blocks[request.tenant] -= len(request.blocks)


def strict_room(
    running: Collection[Request], queue: WaitingQueue, reserved: Room, free: Room, shared: int, short: bool
) -> StrictRoom:
    """Returns the rows, KV blocks and prompt tokens ahead that a strict request would find that came now. Best effort's
    places count as free. `reserved` is for strict ones: while a standard request waits, they get no more than that of
    what is free (`Admission`). `shared`: as the BlockPool has it; others may keep that number of the blocks of those
    that go, but none that nobody knows. `short`: a request waits for rows or blocks."""
    if short and queue.standard:
        free = Room(min(free.rows, reserved.rows), min(free.blocks, reserved.blocks))
    giving = [request for request in running if _may_go(request)]
    strict = [request for request in running if request.slo_class == "strict"]
    theirs, own_blocks = sum(len(r.blocks) for r in giving), sum(len(r.blocks) - r.known_blocks for r in giving)
    return StrictRoom(
        rows=free.rows + len(giving),
        blocks=free.blocks + max(theirs - shared, own_blocks),
        prompt_tokens=sum(max(0, request.prompt_len - request.computed) for request in strict),
    )


def choose_lenders(running: Iterable[Request], fits: Callable[[Collection[str]], bool]) -> list[Request] | None:
    """Returns the requests that hold adapters whose room on the device would do, by `fits` of their digests. Of the
    least often preempted the latest admitted go first. An adapter that others use, too, frees nothing. Returns None
    where all would not do."""
    users: dict[str, list[Request]] = {}
    for request in running:
        if request.lease is not None:
            users.setdefault(request.lease.digest, []).append(request)
    idle_then = [(digest, those) for digest, those in users.items() if all(map(_may_go, those))]
    idle_then.sort(key=lambda group: max((request.preemptions, -request.admitted) for request in group[1]))
    for count in range(1, len(idle_then) + 1):
        if fits([digest for digest, _ in idle_then[:count]]):
            return [request for _, those in idle_then[:count] for request in those]
    return None


def _may_go(request: Request) -> bool:
    return request.slo_class == "best_effort" and _is_movable(request)


def _is_movable(request: Request) -> bool:
    """Returns whether nothing that is under way on the device may still write to the request's blocks."""
    return not request.in_cold_pass and request.preemptions < MAX_PREEMPTIONS
