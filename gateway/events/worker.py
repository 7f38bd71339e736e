"""Runs events: claims them, executes their calls, and stores the outcomes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

from adapters.errors import StoreUnavailable
from cluster.errors import ServiceError
from gateway.api.schema import InvokeReply
from gateway.background import background
from gateway.events.deliveries import Deliveries
from gateway.events.events import Events
from gateway.events.jobs import WORKER_LEASE_S, release
from gateway.events.records import DELIVERING, EventRecord
from gateway.events.transitions import REFUSED, STOPPED, claimed, expired, failed, postponed, retried, succeeded
from gateway.http.errors import is_unexpected, to_service_error
from gateway.jobs.job_store import Marker, Stored
from gateway.jobs.poller import NoCapacity, NoPlace, Poller, PollResult
from gateway.jobs.windows import Function
from gateway.places.places import Places

DELIVERIES_AT_ONCE = 64
"""Maximum deliveries that one worker handles at once. This is more than the places for webhooks and for destinations
together, so that neither keeps the other waiting."""
IDLE_S = 5.0
"""Seconds between two polls while the worker is idle. Without Redis, this delays events from other hosts."""
BEAT_S = 10.0
STOP_S = 10.0
"""Seconds for which running events may continue while the worker stops. Events that run longer are queued again."""
SAVED_WITHIN_S = 300.0
"""Seconds for which storing an outcome is tried. If that fails, the event is run again, like an event of a lost
worker."""
AGAIN_S = 1.0

Execute = Callable[[EventRecord], Awaitable[InvokeReply]]

log = logging.getLogger("gateway")


class NotKnownHere(ServiceError):
    """The call has fields of a newer release, so another worker must run it."""

    def __init__(self) -> None:
        super().__init__("unavailable", "this worker's release does not know all fields of the call")


class Worker:
    """Worker of one gateway process.

    `execute` runs a call, and raises its error. `can_run` returns whether a node can run calls now. `places`: for
    running events.
    """

    def __init__(
        self,
        events: Events,
        execute: Execute,
        deliveries: Deliveries,
        can_run: Callable[[], Awaitable[bool]],
        places: Places,
    ) -> None:
        self.name = secrets.token_hex(6)
        self._events = events
        self._execute = execute
        self._can_run, self._places = can_run, places
        self._runs = event_poller(
            events, "queued", self._run, at_once=places.pool.size, per_tenant=places.pool.per_tenant
        )
        self._deliveries = event_poller(events, DELIVERING, deliveries.deliver, at_once=DELIVERIES_AT_ONCE)
        self._executions: dict[str, tuple[Stored[EventRecord], asyncio.Task[InvokeReply]]] = {}
        self._stopping = False
        self._beat_at = float("-inf")
        events.on_cancel = self._end_execution

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs events as long as the context lasts, then queues again those that do not end in time."""
        async with background(self._beats):
            async with background(self._runs.run, self._deliveries.run):
                yield
            await self._stop()

    async def _stop(self) -> None:
        if tasks := list(self._runs.active.values()):
            await asyncio.wait(tasks, timeout=STOP_S)
        self._stopping = True
        for event_id in list(self._executions):
            self._end_execution(event_id)
        for task in self._deliveries.active.values():
            task.cancel()
        if tasks := [*self._runs.active.values(), *self._deliveries.active.values()]:
            await asyncio.wait(tasks, timeout=STOP_S)
        try:
            await self._events.threads.write(self._events.store.retire, self.name)
        except StoreUnavailable as error:
            log.warning(
                "an event worker stops without releasing its lease: the registry can't be written",
                extra={"why": str(error)},
            )

    async def _beats(self) -> None:
        while True:
            began, events = monotonic(), self._events
            try:
                await events.threads.write(events.store.beat, self.name, len(self._executions))
                self._beat_at = began
                await self._cancel_lost_executions()
                await events.threads.write(release, events.store, self._lost_here)
            except StoreUnavailable as error:
                log.warning("an event worker's heartbeat can't be written", extra={"why": str(error)})
            await asyncio.sleep(BEAT_S)

    def _lost_here(self, holder: str, event_id: str) -> bool:
        """Returns whether this worker holds the event but does not run it.

        That happens if the store fails during the claim, or fails for too long when the event ends.
        """
        return holder == self.name and event_id not in self._runs.active

    async def _cancel_lost_executions(self) -> None:
        """Cancels executions of events that another worker has cancelled or claimed."""
        for event_id, (stored, _) in list(self._executions.items()):
            now = await self._events.threads.read(self._events.store.find, stored.record.tenant, event_id)
            if now is None or now.record.nonce != stored.record.nonce:
                self._end_execution(event_id)

    def _end_execution(self, event_id: str) -> None:
        if event_id in self._executions:
            self._executions[event_id][1].cancel()

    async def _run(self, stored: Stored[EventRecord]) -> float | None:
        """Claims and runs an event. Raises NoCapacity, and NoPlace if its tenant has no free place.

        Returns the seconds after which a refused event may be accepted; None if it was not refused.
        """
        tenant = stored.record.tenant
        if not self._places.has_room(tenant):
            raise NoPlace(partial(self._places.has_room, tenant))
        with self._places.hold_now(tenant):
            return await self._run_here(stored)

    async def _run_here(self, stored: Stored[EventRecord]) -> float | None:
        """Claims and runs an event, as in `_run`. The caller holds a place."""
        events, now = self._events, await self._events.clock.now()
        if now > stored.record.deadline:
            await events.threads.write(events.store.change, stored, expired(stored.record, now))
            return None
        if monotonic() - self._beat_at > WORKER_LEASE_S / 2:  # the leader may regard this worker as dead
            raise StoreUnavailable("this worker's last heartbeat is too old to run an event")
        if not await self._can_run():  # otherwise each event would use up its attempts in a few seconds
            raise NoCapacity
        claim = await events.threads.write(events.store.change, stored, claimed(stored.record, self.name, now))
        if claim is None:
            return None
        ended, refused_for = await self._outcome(claim)
        await self._save(claim, ended)
        if ended.delivery is not None:
            events.wake()  # for the event's delivery
        return refused_for

    async def _outcome(self, claim: Stored[EventRecord]) -> tuple[EventRecord, float | None]:
        """Returns the event after its execution, and the value that `_run` returns."""
        task = asyncio.ensure_future(self._execute(claim.record))
        self._executions[claim.record.id] = claim, task
        try:
            await asyncio.wait([task])
        finally:
            del self._executions[claim.record.id]
            task.cancel()
        now = await self._now(claim)
        if task.cancelled():
            if self._stopping:
                return retried(claim.record, STOPPED, now, 0.0), None
            return failed(claim.record, ServiceError("cancelled", "it was cancelled"), now), None
        error = task.exception()
        if error is None:
            return succeeded(claim.record, task.result(), now), None
        if is_unexpected(error):
            log.error("an event failed unexpectedly", exc_info=error, extra={"event": claim.record.id})
        service_error = to_service_error(error)
        if isinstance(error, NotKnownHere) or (service_error.type == "unavailable" and not await self._can_run()):
            return postponed(claim.record, service_error, now), None  # the last node went since the claim: nothing ran
        refused_for = (service_error.retry_after or 0.0) if service_error.type in REFUSED else None
        return failed(claim.record, service_error, now), refused_for

    async def _now(self, claim: Stored[EventRecord]) -> float:
        """Returns Unix time by the store's clock. If the store fails, returns the time of the claim, so that the
        outcome is not lost."""
        try:
            return await self._events.clock.now()
        except StoreUnavailable:
            return claim.record.changed

    async def _save(self, claim: Stored[EventRecord], ended: EventRecord) -> None:
        """Stores the outcome, unless another process has changed the event meanwhile. Raises StoreUnavailable."""
        until = monotonic() + SAVED_WITHIN_S
        while True:
            try:
                await self._events.threads.write(self._events.store.change, claim, ended)
                return
            except StoreUnavailable:
                if monotonic() > until:
                    raise
            await asyncio.sleep(AGAIN_S)


def event_poller(
    events: Events,
    index: str,
    handle: Callable[[Stored[EventRecord]], Awaitable[float | None]],
    *,
    at_once: int,
    per_tenant: int | None = None,
) -> Poller[EventRecord]:
    """Returns a poller of the events in `index`. `events` wakes the poller when an event may be due. `handle`,
    `at_once` and `per_tenant`: as in Poller."""

    async def poll(after: str, closed: Collection[Function]) -> PollResult:
        return await events.threads.read(events.store.poll, index, after, await events.clock.now(), closed)

    async def owner(marker: Marker) -> Stored[EventRecord] | None:
        return await events.threads.read(events.store.owner, marker)

    poller = Poller("event", poll, owner, handle, at_once=at_once, idle_s=IDLE_S, per_tenant=per_tenant)
    events.wakes.append(poller.wake)
    return poller
