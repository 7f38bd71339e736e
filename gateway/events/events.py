"""Tenants' asynchronous calls (events). `Events` adds, reads, lists, cancels and redrives them; `Worker` runs them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import islice
from time import monotonic
from typing import NamedTuple

import msgspec

from adapters.errors import Conflict, NotFound, StoreUnavailable
from cluster.errors import ServiceError
from cluster.redis_link import RedisLink
from gateway.catalog.threads import StoreThreads
from gateway.events.event_store import EventStore
from gateway.events.quota import AccountOf, CallQuota
from gateway.events.records import DEAD_STATES, ENDED, EventRecord, State, folder
from gateway.events.transitions import cancelled, redriven
from gateway.jobs.clocks import StoreClock
from gateway.jobs.job_store import Marker, Stored
from gateway.workers.channel import Channel

MAX_QUEUED_PER_TENANT = 10_000
COUNTED_FOR_S = 5.0
"""Seconds for which the number of a tenant's queued events is cached. Meanwhile this worker adds its own new events to
it."""
MAX_CACHED_COUNTS = 10_000
FULL_RETRY_AFTER_S = 10.0
MAX_SCANNED_MARKERS = 5000
MAX_REDRIVEN = 500
MAX_SEARCH_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}", re.ASCII)
ATTEMPTS = 10
"""Maximum attempts at one change of an event. An attempt fails if another process changes the event first."""


class EventQueued(msgspec.Struct, frozen=True, array_like=True, tag="queued"):
    """Message that an event was queued, so that idle workers poll."""


def make_channel(link: RedisLink | None) -> Channel[EventQueued]:
    """Returns the channel; the link must not be connected yet.

    It is separate from the peers' channel, because many new events must not displace waiting messages of that channel.
    """
    return Channel(link, "events", EventQueued, 100)


class Page(NamedTuple):
    events: list[EventRecord]
    after: str | None


class _Count(NamedTuple):
    events: int
    counted: float


class Events:
    """Asynchronous calls of all tenants. `max_queued`: maximum queued events of a tenant, as each worker counts them.
    `account_of` returns a tenant's record, whose limits bound its stored events."""

    def __init__(
        self,
        store: EventStore,
        threads: StoreThreads,
        channel: Channel[EventQueued],
        max_queued: int = MAX_QUEUED_PER_TENANT,
        *,
        account_of: AccountOf,
    ) -> None:
        self.store = store
        self.threads = threads
        self.clock = StoreClock(store.objects, threads, monotonic)
        self.wakes: list[asyncio.Event] = []
        """`asyncio.Event`s of the pollers, which are set when there may be an event to run or a delivery to try."""
        self.on_cancel: Callable[[str], None] = lambda _: None
        """Function that is called with the id of each event that is cancelled in this process."""
        self._channel = channel
        self._channel.on_message = lambda _: self.wake()
        self._max_queued = max_queued
        self._quota = CallQuota(store.objects, threads, account_of)
        self._counts: dict[str, _Count] = {}

    async def add(self, event: EventRecord) -> EventRecord:
        """Stores the event durably and returns it, or the stored event of the same id.

        Raises ServiceError: `overloaded` when the tenant's queue is full, `rate_limited` when it may store no more
        calls, `conflict` when another call has used the Idempotency-Key; StoreUnavailable.
        """
        stored = await self.threads.read(self.store.find, event.tenant, event.id)
        if stored is None:
            await self._check_room(event.tenant, 1)
            async with self._quota.room(event.tenant, len(msgspec.json.encode(event))):
                added = await self.threads.write(self.store.add, event) is not None
            if added:
                self.announce()
                return event
            stored = await self.threads.read(self.store.find, event.tenant, event.id)
        if stored is None:
            raise StoreUnavailable("an earlier call with this Idempotency-Key is being removed")
        if stored.record.fingerprint != event.fingerprint:
            raise ServiceError("conflict", "another call has used this Idempotency-Key", param="idempotency-key")
        return stored.record

    async def get(self, tenant: str, event_id: str) -> EventRecord:
        """Returns an event. Raises NotFound, StoreUnavailable."""
        return (await self._stored(tenant, event_id)).record

    async def list(self, tenant: str, states: tuple[State, ...], function: str | None, after: str, limit: int) -> Page:
        """Returns at most `limit` events in these states, the last ended first. Raises StoreUnavailable.

        `after`: the previous page's `after`, or empty.
        """
        return await self.threads.read(self._list, tenant, states, function, after, limit)

    async def cancel(self, tenant: str, event_id: str) -> EventRecord:
        """Cancels an event. Raises NotFound, Conflict for an event that has ended, StoreUnavailable."""

        def change(event: EventRecord, now: float) -> EventRecord:
            if event.state in ENDED and event.state != "cancelled":
                raise Conflict(f"the invocation has ended: it is {event.state}")
            return event if event.state == "cancelled" else cancelled(event, now)

        event = await self._change(tenant, event_id, change)
        self.on_cancel(event_id)
        return event

    async def redrive(self, tenant: str, event_id: str) -> EventRecord:
        """Queues a dead letter again. Raises NotFound, Conflict, ServiceError `overloaded`, StoreUnavailable."""
        await self._check_room(tenant, 1)
        return await self._redrive(tenant, event_id)

    async def redrive_all(self, tenant: str, function: str | None) -> tuple[int, bool]:
        """Queues up to MAX_REDRIVEN dead letters again. Returns their number, and whether there may be more.

        Raises ServiceError `overloaded`, StoreUnavailable.
        """
        page, until = await self.list(tenant, DEAD_STATES, function, "", MAX_REDRIVEN), monotonic() + MAX_SEARCH_S
        while not page.events and page.after is not None and monotonic() < until:  # page of other functions
            page = await self.list(tenant, DEAD_STATES, function, page.after, MAX_REDRIVEN)
        await self._check_room(tenant, len(page.events))
        count = 0
        for event in page.events:
            try:
                await self._redrive(tenant, event.id)
            except (NotFound, Conflict):  # another process was faster
                continue
            count += 1
        return count, page.after is not None

    def announce(self) -> None:
        """Wakes the pollers of all processes."""
        self.wake()
        self._channel.publish(EventQueued())

    def wake(self) -> None:
        for wake in self.wakes:
            wake.set()

    async def _redrive(self, tenant: str, event_id: str) -> EventRecord:
        def change(event: EventRecord, now: float) -> EventRecord:
            if event.state not in DEAD_STATES:
                raise Conflict(f"the invocation is not a dead letter: it is {event.state}")
            return redriven(event, now)

        event = await self._change(tenant, event_id, change)
        self.announce()
        return event

    async def _check_room(self, tenant: str, new: int) -> None:
        count = self._counts.get(tenant)
        if count is None or monotonic() - count.counted > COUNTED_FOR_S:
            count = _Count(await self.threads.read(self._count, tenant), monotonic())
        if count.events + new > self._max_queued:
            self._counts[tenant] = count
            why = f"the tenant has {self._max_queued} asynchronous calls waiting already"
            raise ServiceError("overloaded", why, retry_after=FULL_RETRY_AFTER_S)
        if len(self._counts) >= MAX_CACHED_COUNTS:
            self._counts.clear()
        self._counts[tenant] = count._replace(events=count.events + new)

    def _count(self, tenant: str) -> int:
        return sum(1 for _ in islice(self.store.list_markers(folder("queued", tenant)), self._max_queued))

    async def _stored(self, tenant: str, event_id: str) -> Stored[EventRecord]:
        stored = await self.threads.read(self.store.find, tenant, event_id) if _is_id(event_id) else None
        if stored is None:
            raise NotFound(f"there is no invocation {event_id[:100]!r}")
        return stored

    async def _change(
        self, tenant: str, event_id: str, change: Callable[[EventRecord, float], EventRecord]
    ) -> EventRecord:
        for _ in range(ATTEMPTS):
            stored = await self._stored(tenant, event_id)
            event = change(stored.record, await self.clock.now())
            if event is stored.record or await self.threads.write(self.store.change, stored, event) is not None:
                return event
        raise StoreUnavailable(f"invocation {event_id} is changed by too many processes at once; try again")

    def _list(self, tenant: str, states: tuple[State, ...], function: str | None, after: str, limit: int) -> Page:
        markers: list[Marker] = []
        scanned = 0
        first, _, name = after.partition("/")
        for state in states[_position(first, name, states) :]:
            prefix = folder(state, tenant)
            for marker in self.store.list_markers(prefix, prefix + name if state == first else ""):
                scanned += 1
                if function in (None, marker.function):
                    markers.append(marker)
                if len(markers) == limit or scanned == MAX_SCANNED_MARKERS:
                    return Page(self.store.records(markers), f"{state}/{marker.key.removeprefix(prefix)}")
        return Page(self.store.records(markers), None)


def _position(first: str, name: str, states: tuple[State, ...]) -> int:
    """Returns the index in `states` of the state with which a page begins. Raises ServiceError for an invalid
    `after`."""
    if not first and not name:
        return 0
    if first not in states or not _NAME.fullmatch(name):
        raise ServiceError("validation_failed", "after is not `next` of an earlier page of this list", param="after")
    return states.index(first)


def _is_id(text: str) -> bool:
    return text.startswith("inv_") and text[4:].isalnum() and text.isascii() and len(text) <= 64
