"""Choice of requests to preempt: best-effort requests for a strict one, and requests of tenants over their share for
the first request of an idle tenant. Preempted requests are computed again later (`Engine._preempt`)."""

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
"""Preemptions after which a request can't be preempted again."""


def choose_victims(
    running: Iterable[Request],
    short: Room,
    pool: BlockPool,
    cached: Collection[int],
    over_share: OverShare | None = None,
) -> list[Request] | None:
    """Returns the requests to preempt to make room for a new request. Returns None if all together would not suffice.

    `short`: rows and KV blocks that are missing. `cached`: blocks that the new request uses as its prefix, whose
    release gains nothing. The least often preempted requests go first; among them the latest admitted, which have least
    to recompute. `over_share` decides which may go; None: best-effort requests.
    """
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
    """Rows and KV blocks that each tenant has, less those of the victims chosen so far.

    A tenant keeps at least its share and one row. Strict requests are never preempted; a best-effort request preempts
    only other best-effort requests.
    """

    def __init__(self, running: Collection[Request], share: Room, slo_class: SloClass) -> None:
        self._share, self._slo_class = share, slo_class
        self._rows = Counter(request.tenant for request in running)
        self._blocks: Counter[str] = Counter()
        for request in running:
            self._blocks[request.tenant] += len(request.blocks)

    def may_go(self, request: Request) -> bool:
        """Returns whether the request may be preempted: its tenant has more than its share."""
        tenant, needed = request.tenant, ("strict", "standard") if self._slo_class == "best_effort" else ("strict",)
        rows, blocks = self._rows[tenant], self._blocks[tenant]
        over = rows > self._share.rows or (rows > 1 and blocks - len(request.blocks) >= self._share.blocks)
        return over and request.slo_class not in needed and _is_movable(request)

    def remove(self, request: Request) -> None:
        """Subtracts the rows and blocks of a chosen victim from its tenant's."""
        self._rows[request.tenant] -= 1
        self._blocks[request.tenant] -= len(request.blocks)


def strict_room(
    running: Collection[Request], queue: WaitingQueue, reserved: Room, free: Room, shared: int, short: bool
) -> StrictRoom:
    """Returns the rows, KV blocks and pending prompt tokens that a strict request would find if it arrived now. Rows
    and blocks of best-effort requests count as free.

    `reserved`: room for strict requests; while a standard request waits, they get only that part of the free room
    (`Admission`). `shared`: as in BlockPool. Of the preempted requests' blocks, at most this number may stay in use by
    others; blocks outside the prefix cache never do. `short`: whether a request waits for rows or blocks.
    """
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
    """Returns the best-effort requests to preempt so that an adapter fits on the device. Returns None if all would not
    suffice.

    `fits` returns whether it would fit without the adapters with the given digests. The least often preempted requests
    go first, among them the latest admitted. Adapters that other requests also use free nothing.
    """
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
    """Returns whether the request may be preempted at all. It can begin again, no open cold pass writes to its blocks,
    and it was preempted fewer than MAX_PREEMPTIONS times."""
    return request.can_restart and not request.in_cold_pass and request.preemptions < MAX_PREEMPTIONS
