"""Rows and KV blocks reserved for strict requests, and for tenants that call occasionally.

Nothing is reserved for those who do not call. A node without a strict request for STRICT_SECONDS reserves nothing for
them; a node with a single tenant reserves nothing for others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from node_agent.engine.request import Request
from node_agent.engine.waiting import WaitingQueue

STRICT_SECONDS = 600.0
"""Seconds after a strict request during which rows and blocks are reserved for further ones."""
TENANT_SECONDS = 10.0
"""Seconds after a tenant's request during which a row is reserved for its next one."""
AWAITED_SECONDS = 10.0
"""Seconds after a call that is not best effort during which another one is likely. Meanwhile best-effort passes stay
short, and best-effort requests do not evict its adapter."""
MAX_AHEAD = 2048.0
"""Maximum by which a tenant's counter may exceed the smallest one (the floor) so that the tenant may use reserved rows
and blocks. The counter is virtual time: service / weight. About ten short calls reach the maximum."""
KEPT_SHARE = 8
"""Divisor: at most 1/n of rows and of KV blocks is reserved for strict requests, and the same part for light tenants
(`Reserves.light`)."""
FEWEST_ROWS = 4
"""Number of rows of a batch from which at least one row is reserved."""


class Callers:
    """Record of recent callers."""

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        """time of each tenant's last call that was not strict, latest last"""
        self._strict_at = float("-inf")
        self._awaited_at = float("-inf")
        """time of the last call that was not best effort"""
        self._adapters: dict[str, float] = {}
        """time of each adapter's last call that was not best effort, latest last"""

    def record_call(self, request: Request) -> bool:
        """Records the arrival of a request. Returns whether it is its tenant's first non-strict request for
        TENANT_SECONDS; False for strict requests."""
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
        """Returns whether a call that was not best effort came within AWAITED_SECONDS, so that another one is
        likely."""
        return now - self._awaited_at < AWAITED_SECONDS

    def awaited_adapters(self, now: float) -> Iterator[str]:
        """Returns the adapters called within AWAITED_SECONDS by requests that were not best effort, latest first."""
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
        """Returns the tenants that called within TENANT_SECONDS, strict calls not counted."""
        return (tenant for tenant, at in self._tenants.items() if now - at < TENANT_SECONDS)


@dataclass(frozen=True)
class Room:
    """Number of batch rows and of KV blocks."""

    rows: int
    blocks: int


class Reserves:
    """Rows and KV blocks that each request must leave free, by the present batch and queue."""

    def __init__(
        self, callers: Callers, queue: WaitingQueue, running: Iterable[Request], max_rows: int, blocks: int
    ) -> None:
        self._callers, self._queue, self._now = callers, queue, time.monotonic()
        self._max_served = queue.shares.floor + MAX_AHEAD
        self._all = Room(max_rows, blocks)
        self._rows = max_rows // KEPT_SHARE or int(max_rows >= FEWEST_ROWS)
        self.max_blocks = blocks // KEPT_SHARE
        """maximum number of KV blocks reserved for strict requests, and the same number for light tenants"""
        self._tenants: dict[str, int] = {}
        """number of rows by tenant"""
        self._strict_rows = self._strict_blocks = 0
        self._not_strict = 0
        for request in running:
            self.count(request, 1)

    def light(self, tenant: str) -> bool:
        """Returns whether a waiting tenant is light: it has nothing in the batch, or is `modest`. It may use the rows
        and blocks reserved for light tenants."""
        return not self._tenants.get(tenant) or self.modest(tenant)

    def may_claim(self, request: Request) -> bool:
        """Returns whether a waiting request may preempt a request of a tenant over its share. It must be its tenant's
        first after a pause, with no row of the tenant in the batch."""
        return request.after_idle and not self._tenants.get(request.tenant)

    def modest(self, tenant: str) -> bool:
        """Returns whether the tenant asks for little. It has at most one waiting request, and its counter exceeds the
        floor by at most MAX_AHEAD."""
        return self._queue.waiting_of(tenant) <= 1 and self._queue.shares.tenant(tenant) <= self._max_served

    @property
    def crowded(self) -> bool:
        """Returns whether a tenant that is not light waits while other callers are present. Others are tenants that
        wait, run or called recently, and recent strict requests."""
        crowd = {tenant for tenant in self._queue.tenants if not self.light(tenant)}
        if len(crowd) != 1 or self._callers.strict(self._now):
            return bool(crowd)
        running = (tenant for tenant, rows in self._tenants.items() if rows)
        present = chain(self._queue.tenants, self._callers.lately(self._now), running)
        return any(tenant not in crowd for tenant in present)

    def equal_share(self, request: Request) -> Room:
        """Returns an equal share of all rows and blocks, among the request's tenant and the tenants with rows."""
        tenants = len({request.tenant, *(tenant for tenant, rows in self._tenants.items() if rows)})
        return Room(max(1, self._all.rows // tenants), self._all.blocks // tenants)

    def awaited_adapters(self) -> Iterator[str]:
        """Returns Callers.awaited_adapters as of the creation of this object."""
        return self._callers.awaited_adapters(self._now)

    def for_strict(self) -> Room:
        """Returns the part of the strict reserve that strict requests do not use yet."""
        if not self._callers.strict(self._now):
            return Room(0, 0)
        return Room(max(0, self._rows - self._strict_rows), max(0, self.max_blocks - self._strict_blocks))

    def kept_from(self, request: Request) -> Room:
        """Returns the rows and blocks that the request must leave free. They are none for a strict request. They are
        also none while only strict requests run: otherwise a request that needs more than the unreserved part would
        wait forever."""
        if request.slo_class == "strict" or not self._not_strict:
            return Room(0, 0)
        strict = self.for_strict()
        expected = 0 if self.light(request.tenant) else self._expected
        return Room(strict.rows + expected, strict.blocks + (self.max_blocks if expected else 0))

    @property
    def _expected(self) -> int:
        """Returns the number of rows reserved for the next calls of tenants: those that called recently and have
        nothing waiting, and light ones."""
        waiting, lately = self._queue.tenants, self._callers.lately(self._now)
        expected = (tenant for tenant in lately if tenant not in waiting or self.light(tenant))
        return sum(1 for _ in islice(expected, self._rows))

    def count(self, request: Request, by: int) -> None:
        """Adds the rows and blocks of an admitted request (`by` 1), or subtracts those of a preempted one (-1)."""
        self._tenants[request.tenant] = self._tenants.get(request.tenant, 0) + by
        if request.slo_class == "strict":
            self._strict_rows += by
            self._strict_blocks += by * len(request.blocks)
        else:
            self._not_strict += by
