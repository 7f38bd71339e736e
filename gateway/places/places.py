"""Places for work of tenants: a limited number in all, fewer for each tenant, and fair turns for those who wait.

Work whose length a tenant decides holds a place as long as it runs. A tenant holds at most its part of the places, and
the last free place goes only to a tenant that holds none. So no tenant keeps another from its turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

import msgspec

from cluster.errors import ServiceError

RETRY_AFTER_S = 2.0
SERVICE = ""
"""Owner of work that no tenant has caused. It may hold all places."""

owner_now: ContextVar[str] = ContextVar("owner_now", default=SERVICE)
"""Tenant for which the current task works; SERVICE if there is none. Routes and pollers set it."""


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Size and bounds of one shared pool, in one gateway worker."""

    name: str
    work: str
    """Name of the work that holds places, in the plural, for messages to callers."""
    size: int
    per_tenant: int
    waiting: int = 1024

    def __post_init__(self) -> None:
        if self.size < 1 or self.per_tenant < 1 or (self.size > 1 and self.per_tenant >= self.size):
            raise ValueError(f"pool {self.name}: {self.per_tenant} of {self.size} places leave none for other tenants")


class Places:
    """Places of one pool. Not thread-safe: all methods are for the event loop's thread."""

    def __init__(self, pool: Pool, on_change: Callable[[Places, bool], None] = lambda _places, _refused: None) -> None:
        """`on_change` is called after each change of the numbers in use or waiting, and with True after a refusal."""
        self.pool = pool
        self._on_change = on_change
        self._free = pool.size
        self._in_use_by: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._waiting_count = 0
        self._turns: dict[str, int] = {}
        """Number of the last place that each owner got, of those that hold places or wait. Places are numbered as they
        are given. An owner without one counts as older than those of the places that may be held now, but not as
        older than all: so an endless row of new owners overtakes nobody."""
        self._last_number = 0

    @property
    def in_use(self) -> int:
        return self.pool.size - self._free

    @property
    def waiting(self) -> int:
        return self._waiting_count

    def has_room(self, owner: str) -> bool:
        """Returns whether the owner would get a place at once."""
        in_use = self._in_use_by.get(owner, 0)
        if owner == SERVICE or not in_use:
            return self._free > 0
        return in_use < self.pool.per_tenant and self._free > 1

    @contextmanager
    def hold_now(self, owner: str) -> Iterator[None]:
        """Holds a place as long as the context lasts. Raises ServiceError `overloaded` if the owner gets none at
        once."""
        if not self.has_room(owner):
            raise self._refused(self._why_no_room(owner))
        self._take(owner)
        try:
            yield
        finally:
            self.release(owner)

    @asynccontextmanager
    async def hold(self, owner: str, wait_s: float | None = None) -> AsyncIterator[None]:
        """Holds a place as long as the context lasts. Waits and raises as `acquire`."""
        await self.acquire(owner, wait_s)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str, wait_s: float | None = None) -> None:
        """Takes a place, which the caller must release. Waits at most `wait_s` seconds; if None, callers set their own
        timeouts.

        Raises ServiceError `overloaded` after that time, or at once if too much work of the tenant waits.
        """
        if owner not in self._waiting and self.has_room(owner):
            self._take(owner)
            return
        if owner != SERVICE and len(self._waiting.get(owner, ())) >= self.pool.waiting:
            raise self._refused(f"{self.pool.waiting} of your {self.pool.work} are already waiting")
        try:
            async with asyncio.timeout(wait_s):
                await self._wait_for_turn(owner)
        except TimeoutError:
            raise self._refused(self._why_no_room(owner)) from None

    async def _wait_for_turn(self, owner: str) -> None:
        """Waits until the owner's turn, which takes a place."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self._waiting_count += 1
        self._turns.setdefault(owner, self._last_number - self.pool.size)
        self._on_change(self, False)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(owner)
            elif granted in (queue := self._waiting.get(owner, deque())):
                queue.remove(granted)
                self._waiting_count -= 1
                self._forget_idle(owner)
                self._on_change(self, False)
            raise

    def release(self, owner: str) -> None:
        """Gives back a place, and grants the free places to those who wait."""
        self._free += 1
        self._in_use_by[owner] -= 1
        if not self._in_use_by[owner]:
            del self._in_use_by[owner]
        self._grant()
        self._forget_idle(owner)
        self._on_change(self, False)

    def _take(self, owner: str) -> None:
        self._free -= 1
        self._in_use_by[owner] = self._in_use_by.get(owner, 0) + 1
        self._last_number += 1
        self._turns[owner] = self._last_number
        self._on_change(self, False)

    def _grant(self) -> None:
        """Grants free places: first to the owner that holds the fewest, and among equals to the one whose last turn is
        the longest ago."""
        while eligible := [owner for owner in self._waiting if self.has_room(owner)]:
            owner = min(eligible, key=lambda owner: (self._in_use_by.get(owner, 0), self._turns.get(owner, 0)))
            granted = self._waiting[owner].popleft()
            self._waiting_count -= 1
            if not granted.done():  # a cancelled one has no need of its turn
                self._take(owner)
                granted.set_result(None)
            self._forget_idle(owner)

    def _forget_idle(self, owner: str) -> None:
        """Removes what is kept of an owner that waits no more, or neither waits nor holds a place."""
        if not self._waiting.get(owner, True):
            del self._waiting[owner]
        if owner not in self._waiting and owner not in self._in_use_by:
            self._turns.pop(owner, None)

    def _why_no_room(self, owner: str) -> str:
        pool, in_use = self.pool, self._in_use_by.get(owner, 0)
        if in_use >= pool.per_tenant:
            return f"you have {in_use} {pool.work} under way already, and may have {pool.per_tenant} at once"
        if in_use:
            return f"you have {in_use} {pool.work} under way already, and the last place is kept for other tenants"
        return f"all {pool.size} places for {pool.work} are taken by other tenants"

    def _refused(self, why: str) -> ServiceError:
        """Counts a refusal and returns its error."""
        self._on_change(self, True)
        return ServiceError("overloaded", f"{why}; try again later", retry_after=RETRY_AFTER_S)


@contextmanager
def working_for(tenant: str) -> Iterator[None]:
    """Makes the tenant the owner of all work in the context."""
    token = owner_now.set(tenant)
    try:
        yield
    finally:
        owner_now.reset(token)
