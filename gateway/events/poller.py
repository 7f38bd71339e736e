"""Finds events that are due, and hands them out in fair shares of tenants."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from itertools import islice
from math import inf
from time import monotonic
from typing import NamedTuple

from adapters.errors import CorruptRecord, StoreUnavailable
from adapters.store import ObjectInfo
from gateway.events.event_store import EventStore, Stored
from gateway.events.events import Events
from gateway.events.pace import Function, Paces
from gateway.events.records import Marker, folder

IDLE_S = 5.0
"""Between two looks at the store while nothing wakes the worker: other hosts' events wait so long where no Redis is."""
LOOK_S = 0.1
"""Least time between two looks: a store asks money for each."""
AWAY_S = 2.0
"""Without a look, once an event could not be changed because the store does not answer, or was not to begin: it is
there at each look."""
FRESH_S = 1.0
"""After which a look is not used any more: other tenants may have come."""
TENANTS_A_LOOK = 200
"""Tenants whose queues one look goes through; the next look goes on behind them."""
LONGEST_LOOK_S = 3.0
"""After which the next look goes on behind the tenant that was reached: reads of a store are given up later."""
WINDOW = 128
"""Events of a tenant among which a look chooses."""
EVENTS_A_TENANT = 32
"""Due events of a tenant that one look takes up."""

log = logging.getLogger("gateway")


class NotNow(Exception):
    """No event of the index can be handled for a while. It is left as it was."""


class Due(NamedTuple):
    marker: Marker
    info: ObjectInfo


class Look(NamedTuple):
    """What one look at the store has found."""

    due: dict[str, list[Due]]
    """By tenant, in the order in which they are due."""
    next_due: float | None
    """When the first of the others is due, by the store's clock."""
    after: str
    """Where the next look begins; empty: at the first tenant."""


class Poller:
    """Calls `handle` with each due event of an index, at most `at_once` at a time, those of the tenant that has the
    fewest first. `handle` gets the event as it is stored now, with its marker in place, and changes it. It returns
    seconds after which what was refused may be let through, or None if nothing was. Raises NotNow."""

    def __init__(
        self, events: Events, index: str, handle: Callable[[Stored], Awaitable[float | None]], *, at_once: int
    ) -> None:
        self.active: dict[str, asyncio.Task[None]] = {}
        """By the events' ids."""
        self._events = events
        self._index = index
        self._handle = handle
        self._at_once = at_once
        self._tenants: Counter[str] = Counter()
        """How many are handled of each tenant."""
        self._paces = Paces(at_once, monotonic)
        self._after = ""
        self._left: dict[str, list[Due]] = {}
        """Of the last look, what has not begun."""
        self._looked = float("-inf")
        self._away_until = float("-inf")
        self._next_due: float | None = None
        self._wake = asyncio.Event()
        events.wakes.append(self._wake)
        self._some_ended = asyncio.Event()

    async def run(self) -> None:
        """Runs until it is cancelled; then nothing new begins, but what is handled goes on."""
        while True:
            try:
                pause = await self._round()
            except StoreUnavailable as error:
                log.warning("events can't be looked for", extra={"why": str(error)})
                pause = IDLE_S
            await self._rest(pause)

    async def _round(self) -> float:
        """Begins what is due and has room. Returns for how many seconds to rest, unless something happens before."""
        if len(self.active) >= self._at_once:
            return IDLE_S
        if (away := self._away_until - monotonic()) > 0:
            return away
        since = monotonic() - self._looked
        if since < LOOK_S and not self._may_begin_any():
            await asyncio.sleep(LOOK_S - since)
        if since > FRESH_S or not self._may_begin_any():
            await self._look()
        while len(self.active) < self._at_once and (due := self._next()) is not None:
            if due.marker.id not in self.active:  # a leftover may name an event that has another marker, too
                self._begin(due)
        if len(self.active) >= self._at_once and any(self._left.values()):
            return IDLE_S  # until one has ended: there is no room
        if self._after:
            return LOOK_S
        return max(LOOK_S, min(IDLE_S, await self._until_due(), self._until_let()))

    async def _until_due(self) -> float:
        """Returns seconds; infinite where nothing is known to be due later."""
        return inf if self._next_due is None else self._next_due - await self._events.clock.now()

    def _until_let(self) -> float:
        """The same until events of a function that was refused may be tried again."""
        at = self._paces.next_at()
        return inf if at is None else at - monotonic()

    async def _look(self) -> None:
        self._wake.clear()
        now = await self._events.clock.now()
        store, held = self._events.store, self._paces.held()
        look = await self._events.threads.read(_look, store, self._index, self._after, now, held)
        self._looked, self._after, self._next_due = monotonic(), look.after, look.next_due
        self._left = {
            tenant: [due for due in found if due.marker.id not in self.active] for tenant, found in look.due.items()
        }

    def _may_begin_any(self) -> bool:
        return any(self._first(due) is not None for due in self._left.values())

    def _next(self) -> Due | None:
        """Takes the first due event of the tenant of which the fewest are handled. Returns None if none may begin."""
        first = {tenant: at for tenant, due in self._left.items() if (at := self._first(due)) is not None}
        tenant = min(first, key=lambda tenant: (self._tenants[tenant], random.random()), default=None)
        return None if tenant is None else self._left[tenant].pop(first[tenant])

    def _first(self, due: list[Due]) -> int | None:
        """Returns the place of the first whose function may have one more."""
        return next((at for at, each in enumerate(due) if self._paces.may_begin(_function(each.marker))), None)

    def _begin(self, due: Due) -> None:
        marker = due.marker
        self._tenants[marker.tenant] += 1
        self._paces.begin(_function(marker))
        task = self.active[marker.id] = asyncio.create_task(self._one(due))

        def end(_: asyncio.Task[None]) -> None:
            del self.active[marker.id]
            self._paces.end(_function(marker))
            self._tenants[marker.tenant] -= 1
            if not self._tenants[marker.tenant]:
                del self._tenants[marker.tenant]
            self._some_ended.set()

        task.add_done_callback(end)

    async def _one(self, due: Due) -> None:
        events = self._events
        try:
            stored = await events.threads.read(events.store.owner, due.marker, due.info.modified)
            if stored is not None:
                self._note(due.marker, await self._handle(stored))
        except CorruptRecord as error:
            log.error("an event can't be read", extra={"event": due.marker.id, "why": str(error)})
        except StoreUnavailable as error:  # its marker stays: it is found again
            log.warning("an event waits for the store", extra={"event": due.marker.id, "why": str(error)})
            self._stay_away()
        except NotNow:
            self._stay_away()
        except Exception:  # one event must not end the others
            log.exception("an event could not be handled", extra={"event": due.marker.id})

    def _stay_away(self) -> None:
        self._away_until = monotonic() + AWAY_S
        self._left = {}

    def _note(self, marker: Marker, refused_for: float | None) -> None:
        if refused_for is None:
            self._paces.let_through(_function(marker))
        else:
            self._paces.refuse(_function(marker), refused_for)

    async def _rest(self, seconds: float) -> None:
        """Returns after `seconds`, or sooner when one has ended or, while there is room, an event was queued."""
        self._some_ended.clear()
        wakes = [self._some_ended] if len(self.active) >= self._at_once else [self._wake, self._some_ended]
        waits = [asyncio.ensure_future(event.wait()) for event in wakes]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _function(marker: Marker) -> Function:
    return marker.tenant, marker.function


def _look(store: EventStore, index: str, after: str, now: float, held: Collection[Function] = frozenset()) -> Look:
    """`held`: functions whose events are passed over."""
    due: dict[str, list[Due]] = {}
    next_due: float | None = None
    until = monotonic() + LONGEST_LOOK_S
    tenants = store.objects.folders(f"events/{index}/", after, TENANTS_A_LOOK)
    next_after = tenants[-1] if len(tenants) == TENANTS_A_LOOK else ""
    for tenant in tenants:
        # Begins anywhere among the due ones, so that several workers seldom take the same.
        window = [Due(*found) for found in islice(store.infos(folder(index, tenant), page=WINDOW), WINDOW)]
        ready = [each for each in window if each.marker.time <= now and _function(each.marker) not in held]
        later = next((each.marker.time for each in window if each.marker.time > now), None)
        if later is not None:
            next_due = later if next_due is None else min(next_due, later)
        skipped = random.randrange(len(ready) - EVENTS_A_TENANT + 1) if len(ready) > EVENTS_A_TENANT else 0
        due[tenant] = ready[skipped : skipped + EVENTS_A_TENANT]
        if monotonic() >= until:
            next_after = tenant
            break
    return Look(due, next_due, next_after)
