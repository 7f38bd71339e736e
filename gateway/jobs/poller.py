"""Finds due jobs and starts them in fair shares of tenants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from math import inf
from time import monotonic
from typing import Generic, NamedTuple

from adapters.errors import StoreUnavailable
from gateway.jobs.job_store import Marker, R, Stored
from gateway.jobs.shares import Shares
from gateway.jobs.windows import Function
from gateway.places.places import working_for

MIN_GAP_S = 0.1
"""Minimum seconds between two polls, because a store charges for each."""
BACKOFF_S = 2.0
"""Seconds without a poll after a job failed because the store or capacity was missing. A poll would list the same job
again."""
VALID_S = 1.0
"""Seconds for which the jobs that a poll listed may be started. Then a new poll follows, because tenants that had no
jobs may have some now."""

log = logging.getLogger("gateway")


class NoCapacity(Exception):
    """No job of this kind can be handled for a while. The job that `handle` got was not changed."""


class NoPlace(Exception):
    """The job's tenant has no free place for it. The job was not changed, and starts once `has_place` returns True."""

    def __init__(self, has_place: Callable[[], bool]) -> None:
        super().__init__()
        self.has_place = has_place


class PollResult(NamedTuple):
    """Due jobs of some of the tenants."""

    queues: dict[str, list[Marker]]
    """Markers by tenant, in the order of their due times."""
    next_in_s: float = inf
    """Seconds until the next job that is not in `queues` is due."""
    after: str = ""
    """Tenant after which the next poll begins. If empty, it begins at the first tenant."""


Poll = Callable[[str, Collection[Function]], Awaitable[PollResult]]
"""Function that lists due jobs, starting after `PollResult.after`, without those of the given functions. Raises
StoreUnavailable."""


class Poller(Generic[R]):
    """Calls `handle` with each due job, at most `at_once` at a time. Tenants with the fewest active jobs come first.

    `owner` reads a job by its marker (`JobStore.owner`). `handle` gets the stored job and changes it. It returns
    seconds after which a refused job may be accepted, or None if the job was not refused; it may raise NoCapacity or
    NoPlace. `per_tenant`: maximum active jobs of one tenant; by default all of them.
    `idle_s`: seconds between two polls while nothing wakes the poller. `kind` names the jobs in the log.
    """

    def __init__(
        self,
        kind: str,
        poll: Poll,
        owner: Callable[[Marker], Awaitable[Stored[R] | None]],
        handle: Callable[[Stored[R]], Awaitable[float | None]],
        *,
        at_once: int,
        idle_s: float,
        per_tenant: int | None = None,
    ) -> None:
        self.active: dict[str, asyncio.Task[None]] = {}
        self.wake = asyncio.Event()
        self._kind = kind
        self._poll, self._owner, self._handle = poll, owner, handle
        self._at_once = at_once
        self._shares = Shares(monotonic, at_once=at_once, per_tenant=per_tenant)
        self._idle_s = idle_s
        self._placeless: dict[str, Callable[[], bool]] = {}
        """Functions that return whether a job's tenant has a free place, by the id of the job that waits for one."""
        self._after = ""
        self._waiting: dict[str, list[Marker]] = {}
        """Markers of jobs that the last poll listed and that have not started, by tenant."""
        self._polled_at = self._backoff_until = -inf
        self._next_due_at = inf
        self._job_ended = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled. Then no new job starts, but active jobs continue."""
        while True:
            try:
                pause = await self._round()
            except StoreUnavailable as error:
                log.warning("due %ss can't be listed", self._kind, extra={"why": str(error)})
                pause = self._idle_s
            await self._rest(pause)

    async def _round(self) -> float:
        """Starts due jobs while there is room. Returns the seconds to rest if no event wakes the poller earlier."""
        if len(self.active) >= self._at_once:
            return self._idle_s
        if (backoff := self._backoff_until - monotonic()) > 0:
            return backoff
        since = monotonic() - self._polled_at
        if since < MIN_GAP_S and not self._may_begin_any():
            await asyncio.sleep(MIN_GAP_S - since)
        if since > VALID_S or not self._may_begin_any():
            await self._refresh()
        while len(self.active) < self._at_once and (marker := self._next()) is not None:
            if marker.id not in self.active:  # a leftover may name a job that has another marker, too
                self._begin(marker)
        if len(self.active) >= self._at_once and any(self._waiting.values()):
            return self._idle_s  # no room until a job has ended
        if self._after:
            return MIN_GAP_S
        opening_at = self._shares.windows.next_opening()
        next_at = self._next_due_at if opening_at is None else min(self._next_due_at, opening_at)
        return max(MIN_GAP_S, min(self._idle_s, next_at - monotonic()))

    async def _refresh(self) -> None:
        self.wake.clear()
        started = monotonic()
        result = await self._poll(self._after, self._shares.windows.closed())
        self._polled_at, self._after, self._next_due_at = monotonic(), result.after, started + result.next_in_s
        self._waiting = {
            tenant: [marker for marker in queue if marker.id not in self.active]
            for tenant, queue in result.queues.items()
        }
        listed = {marker.id for queue in self._waiting.values() for marker in queue}
        self._placeless = {id: has_place for id, has_place in self._placeless.items() if id in listed}

    def _may_begin_any(self) -> bool:
        return any(self._first(queue) is not None for queue in self._waiting.values())

    def _next(self) -> Marker | None:
        """Returns the marker of the next job to start, and removes it from the waiting ones. This is the first
        startable job of the tenant with the fewest active jobs. Returns None if no job may start."""
        first = {tenant: at for tenant, queue in self._waiting.items() if (at := self._first(queue)) is not None}
        tenant = self._shares.pick(first)
        return None if tenant is None else self._waiting[tenant].pop(first[tenant])

    def _first(self, queue: list[Marker]) -> int | None:
        """Returns the index in `queue` of the first job that may start; None if there is none. Its function and its
        tenant may run one more job, and its tenant has a place for it."""
        return next((at for at, each in enumerate(queue) if self._may_begin(each)), None)

    def _may_begin(self, marker: Marker) -> bool:
        has_place = self._placeless.get(marker.id)
        return (has_place is None or has_place()) and self._shares.may_begin(function_of(marker))

    def _begin(self, marker: Marker) -> None:
        self._shares.begin(function_of(marker))
        task = self.active[marker.id] = asyncio.create_task(self._run(marker))

        def end(_: asyncio.Task[None]) -> None:
            del self.active[marker.id]
            self._shares.end(function_of(marker))
            self._job_ended.set()

        task.add_done_callback(end)

    async def _run(self, marker: Marker) -> None:
        try:
            stored = await self._owner(marker)
            if stored is not None:
                with working_for(marker.tenant):
                    self._record_outcome(marker, await self._handle(stored))
        except StoreUnavailable as error:  # its marker remains, so the job is found again
            log.warning("a job waits: the registry is unavailable", extra={"job": marker.id, "why": str(error)})
            self._back_off()
        except NoCapacity:
            self._back_off()
        except NoPlace as error:
            self._wait_for_place(marker, error.has_place)
        except Exception:  # one job must not end the others
            log.exception("a job could not be handled", extra={"job": marker.id})

    def _wait_for_place(self, marker: Marker, has_place: Callable[[], bool]) -> None:
        self._placeless[marker.id] = has_place
        self._waiting.setdefault(marker.tenant, []).append(marker)

    def _back_off(self) -> None:
        self._backoff_until = monotonic() + BACKOFF_S
        self._waiting = {}

    def _record_outcome(self, marker: Marker, refused_for_s: float | None) -> None:
        if refused_for_s is None:
            self._shares.windows.record_acceptance(function_of(marker))
        else:
            self._shares.record_refusal(function_of(marker), refused_for_s)

    async def _rest(self, seconds: float) -> None:
        """Waits until `seconds` seconds have passed or a job has ended. While there is room for another job, a new job
        ends the wait as well."""
        self._job_ended.clear()
        wakes = [self._job_ended] if len(self.active) >= self._at_once else [self.wake, self._job_ended]
        waits = [asyncio.ensure_future(event.wait()) for event in wakes]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def function_of(marker: Marker) -> Function:
    return marker.tenant, marker.function
