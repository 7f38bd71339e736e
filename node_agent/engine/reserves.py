"""Rows and KV blocks that are kept free for some: for strict requests, and for tenants that have nothing in the batch.

Nothing is kept for those who don't call: a node that has heard of no strict request for STRICT_SECONDS keeps nothing
for them, and one that serves a single tenant keeps nothing for others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from node_agent.engine.request import Request

STRICT_SECONDS = 600.0
"""For so long after a strict request places are kept for the next ones."""
TENANT_SECONDS = 10.0
"""For so long after a tenant's request a row is kept for it while it has none."""
KEPT_SHARE = 8
"""One of so many rows, and KV blocks, is kept for either at most."""
FEWEST_ROWS = 4
"""With fewer rows none is kept."""


class Callers:
    """Who called lately."""

    def __init__(self) -> None:
        self._tenants: dict[str, float] = {}
        """when each called last but for strict calls, the latest at the end"""
        self._strict_at = float("-inf")

    def note(self, request: Request) -> None:
        """The request has come."""
        if request.slo_class == "strict":
            self._strict_at = request.arrived
            return
        self._tenants.pop(request.tenant, None)
        self._tenants[request.tenant] = request.arrived
        while request.arrived - next(iter(self._tenants.values())) > TENANT_SECONDS:
            del self._tenants[next(iter(self._tenants))]

    def strict(self, now: float) -> bool:
        return now - self._strict_at < STRICT_SECONDS

    def absent(self, there: Iterable[str], now: float) -> int:
        """How many of them, but for those who are `there`."""
        lately = {tenant for tenant, at in self._tenants.items() if now - at < TENANT_SECONDS}
        return len(lately.difference(there))


@dataclass(frozen=True)
class Room:
    rows: int
    blocks: int


class Reserves:
    """What each request must leave free, as the batch is now."""

    def __init__(self, callers: Callers, running: Iterable[Request], max_rows: int, blocks: int) -> None:
        self._callers, self._now = callers, time.monotonic()
        self._rows = max_rows // KEPT_SHARE or int(max_rows >= FEWEST_ROWS)
        self.most_blocks = blocks // KEPT_SHARE
        """that are kept for either"""
        self._tenants: dict[str, int] = {}
        """rows that they have"""
        self._strict_rows = self._strict_blocks = 0
        self._others = 0
        for request in running:
            self.entered(request, len(request.blocks))

    def rows_of(self, tenant: str) -> int:
        return self._tenants.get(tenant, 0)

    def entered(self, request: Request, blocks: int) -> None:
        """The request has a place now, with so many blocks."""
        self._count(request, blocks, 1)

    def left(self, request: Request, blocks: int) -> None:
        self._count(request, blocks, -1)

    def for_strict(self) -> Room:
        """Kept for strict requests, and not taken by them yet."""
        if not self._callers.strict(self._now):
            return Room(0, 0)
        return Room(max(0, self._rows - self._strict_rows), max(0, self.most_blocks - self._strict_blocks))

    def kept_from(self, request: Request) -> Room:
        """What the request must leave free. Nothing while only strict requests run: it may need more than what is not
        kept, and would wait for ever."""
        if request.slo_class == "strict" or not self._others:
            return Room(0, 0)
        strict = self.for_strict()
        absent = 0
        if self.rows_of(request.tenant):
            absent = self._callers.absent((t for t, rows in self._tenants.items() if rows), self._now)
        rows, blocks = min(absent, self._rows), self.most_blocks if absent else 0
        return Room(strict.rows + rows, strict.blocks + blocks)

    def _count(self, request: Request, blocks: int, by: int) -> None:
        self._tenants[request.tenant] = self.rows_of(request.tenant) + by
        if request.slo_class == "strict":
            self._strict_rows += by
            self._strict_blocks += by * blocks
        else:
            self._others += by
