"""Rows and KV blocks that are kept free for some: for strict requests, and for tenants that call now and then.

Nothing is kept for those who don't call: a node that has heard of no strict request for STRICT_SECONDS keeps nothing
for them, and one that serves a single tenant keeps nothing for others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from node_agent.engine.request import Request
from node_agent.engine.waiting import WaitingQueue

STRICT_SECONDS = 600.0
"""Seconds after a strict request for which places are kept for the next ones."""
TENANT_SECONDS = 10.0
"""Seconds after a tenant's request for which a row is kept for its next one."""
AWAITED_SECONDS = 10.0
"""Seconds after a call that is not best effort. In this time best effort's passes stay short for the next one, and best
effort does not evict its adapter."""
MAX_AHEAD = 2048.0
"""Lead over the floor up to which a tenant's counter (virtual time, service / weight) may be for it to use what is
kept. Some ten short calls make it."""
KEPT_SHARE = 8
"""Fraction 1/n of rows, and of KV blocks, that is kept for either at most."""
FEWEST_ROWS = 4
"""Rows below which none is kept."""


class Callers:
    """Record of the callers of late."""

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        """time of each tenant's last call that was not strict, the latest at the end"""
        self._strict_at = float("-inf")
        self._awaited_at = float("-inf")
        """Time of the last call that is not best effort."""
        self._adapters: dict[str, float] = {}
        """Time of each adapter's last such call, the latest at the end."""

    def record_call(self, request: Request) -> bool:
        """Records that a request has arrived. Returns True when it is its tenant's first for TENANT_SECONDS, strict
        ones not counted; False for any other, and for every strict one."""
        if request.slo_class != "best_effort":
            self._record_awaited(request)
        if request.slo_class == "strict":
            self._strict_at = request.arrived
            return False
        before = self._tenants.pop(request.tenant, float("-inf"))
        self._tenants[request.tenant] = request.arrived
        while request.arrived - next(iter(self._tenants.values())) > TENANT_SECONDS:
            del self._tenants[next(iter(self._tenants))]
        return request.arrived - before >= TENANT_SECONDS

    def strict(self, now: float) -> bool:
        return now - self._strict_at < STRICT_SECONDS

    def awaited(self, now: float) -> bool:
        """Returns whether a call that is not best effort came lately: the next one is likely to."""
        return now - self._awaited_at < AWAITED_SECONDS

    def awaited_adapters(self, now: float) -> Iterator[str]:
        """Returns the adapters of calls within AWAITED_SECONDS that were not best effort, the latest first."""
        return (digest for digest, at in reversed(self._adapters.items()) if now - at < AWAITED_SECONDS)

    def _record_awaited(self, request: Request) -> None:
        self._awaited_at = request.arrived
        if request.adapter is None:
            return
        self._adapters.pop(request.adapter.digest, None)
        self._adapters[request.adapter.digest] = request.arrived
        while request.arrived - next(iter(self._adapters.values())) > AWAITED_SECONDS:
            del self._adapters[next(iter(self._adapters))]

    def lately(self, now: float) -> Iterator[str]:
        """Tenants, but for those whose calls are all strict."""
        return (tenant for tenant, at in self._tenants.items() if now - at < TENANT_SECONDS)


@dataclass(frozen=True)
class Room:
    rows: int
    blocks: int


class Reserves:
    """Room that each request must leave free, as batch and queue are now."""

    def __init__(
        self, callers: Callers, queue: WaitingQueue, running: Iterable[Request], max_rows: int, blocks: int
    ) -> None:
        self._callers, self._queue, self._now = callers, queue, time.monotonic()
        self._max_served = queue.shares.floor + MAX_AHEAD
        self._all = Room(max_rows, blocks)
        self._rows = max_rows // KEPT_SHARE or int(max_rows >= FEWEST_ROWS)
        self.max_blocks = blocks // KEPT_SHARE
        """number of KV blocks that are kept for strict, and for light tenants"""
        self._tenants: dict[str, int] = {}
        """number of rows by tenant"""
        self._strict_rows = self._strict_blocks = 0
        self._not_strict = 0
        for request in running:
            self.count(request, 1)

    def light(self, tenant: str) -> bool:
        """Returns whether a waiting tenant may take what is kept for such. It has nothing in the batch, or it has no
        other request waiting and is not far ahead of its turn."""
        return not self._tenants.get(tenant) or self.modest(tenant)

    def may_claim(self, request: Request) -> bool:
        """Returns whether a waiting request may take the place of one whose tenant has more than its share: for the
        first call of a tenant nothing was kept. With a row in the batch it is not the first any more."""
        return request.after_idle and not self._tenants.get(request.tenant)

    def modest(self, tenant: str) -> bool:
        """Returns whether no more than one request of the tenant waits and it is not far ahead of its turn."""
        return self._queue.waiting_of(tenant) <= 1 and self._queue.shares.tenant(tenant) <= self._max_served

    @property
    def crowded(self) -> bool:
        """Returns whether a tenant waits that has much to do, and others are there: they wait or run, or called lately,
        or strict ones did. Alone a tenant is in nobody's way."""
        crowd = {tenant for tenant in self._queue.tenants if not self.light(tenant)}
        if len(crowd) != 1 or self._callers.strict(self._now):
            return bool(crowd)
        running = (tenant for tenant, rows in self._tenants.items() if rows)
        present = chain(self._queue.tenants, self._callers.lately(self._now), running)
        return any(tenant not in crowd for tenant in present)

    def equal_share(self, request: Request) -> Room:
        """Returns an equal part of all rows and blocks: shared among the request's tenant and those that have rows."""
        tenants = len({request.tenant, *(tenant for tenant, rows in self._tenants.items() if rows)})
        return Room(max(1, self._all.rows // tenants), self._all.blocks // tenants)

    def awaited_adapters(self) -> Iterator[str]:
        """Returns Callers.awaited_adapters, by the time of this look at the queue."""
        return self._callers.awaited_adapters(self._now)

    def for_strict(self) -> Room:
        """Kept for strict requests, and not taken by them yet."""
        if not self._callers.strict(self._now):
            return Room(0, 0)
        return Room(max(0, self._rows - self._strict_rows), max(0, self.max_blocks - self._strict_blocks))

    def kept_from(self, request: Request) -> Room:
        """Returns the room that the request must leave free: none for a strict request, and none while only strict ones
        run, for it may need more than what is not kept, and would wait for ever."""
        if request.slo_class == "strict" or not self._not_strict:
            return Room(0, 0)
        strict = self.for_strict()
        expected = 0 if self.light(request.tenant) else self._expected
        return Room(strict.rows + expected, strict.blocks + (self.max_blocks if expected else 0))

    @property
    def _expected(self) -> int:
        """Tenants whose next call is to find a row, as far as rows are kept: those who called lately and have nothing
        waiting, and light ones."""
        waiting, lately = self._queue.tenants, self._callers.lately(self._now)
        expected = (tenant for tenant in lately if tenant not in waiting or self.light(tenant))
        return sum(1 for _ in islice(expected, self._rows))

    def count(self, request: Request, by: int) -> None:
        """The request has got its place and its blocks (1), or gives them up (-1)."""
        self._tenants[request.tenant] = self._tenants.get(request.tenant, 0) + by
        if request.slo_class == "strict":
            self._strict_rows += by
            self._strict_blocks += by * len(request.blocks)
        else:
            self._not_strict += by
