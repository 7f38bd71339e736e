"""What the leader does for events: it takes them from workers that died, and removes them when their time is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from adapters.store import MAX_LIST
from gateway.catalog.threads import LeavableThreads
from gateway.events.event_store import EventStore, Stored
from gateway.events.lost import release_lost
from gateway.events.records import DEAD, DELIVERING, ENDED, State, ended_before
from gateway.leader.turn import Job, Turn

KEPT_S = 24 * 3600.0
DEAD_KEPT_S = 7 * 24 * 3600.0
"""Dead letters wait longer: someone may have to mend what they failed with."""
LOST_PAUSE_S = 10.0
RETENTION_PAUSE_S = 60.0
COUNT_PAUSE_S = 30.0
COUNTED = ("queued", "running", *DEAD, DELIVERING)
"""Indexes whose events are counted for /metrics."""
MAX_COUNTED = 50_000
"""Events of one index: a store lists 1,000 at a time."""


def event_jobs(store: EventStore, announce: Callable[[], None]) -> list[Job]:
    """`announce` is called when events were queued again."""
    # Of their own: what was lost does not wait until what is old is removed.
    releasing, removing, counting = (LeavableThreads(1) for _ in range(3))

    async def release(turn: Turn) -> None:
        try:
            await releasing.run(partial(release_lost, store, turn))
        finally:
            if turn.work:  # be it that the turn has ended amid them
                announce()

    async def retain(turn: Turn) -> None:
        await removing.run(partial(remove_old, store, turn))

    async def count(turn: Turn) -> None:
        await counting.run(partial(count_events, store, turn))

    return [
        Job("lost_events", release, LOST_PAUSE_S),
        Job("event_retention", retain, RETENTION_PAUSE_S),
        Job("event_counts", count, COUNT_PAUSE_S),
    ]


def count_events(store: EventStore, turn: Turn) -> None:
    """Has /metrics say how many events there are: MAX_COUNTED of an index at most. Raises TurnEnded,
    StoreUnavailable."""
    for index in COUNTED:
        count = 0
        for _ in islice(store.infos(f"events/{index}/"), MAX_COUNTED):
            count += 1
            if count % MAX_LIST == 0:
                turn.check()
        store.metrics.show_there(index, count)
        turn.work += count


def remove_old(store: EventStore, turn: Turn) -> None:
    """Removes events that ended long enough ago. What is left at the turn's end waits for the next one.

    Raises TurnEnded, StoreUnavailable.
    """
    now = store.objects.now()
    for state in ENDED:
        before = now - kept_seconds(state)
        for tenant in store.tenants(state):
            after = ended_before(state, tenant, before)
            for marker, info in store.infos(f"events/{state}/{tenant}/", after):
                turn.check()
                stored = store.readable_owner(marker, info.modified)
                turn.work += stored is not None and _remove(store, stored)


def kept_seconds(state: State) -> float:
    return DEAD_KEPT_S if state in DEAD else KEPT_S


def _remove(store: EventStore, stored: Stored) -> bool:
    """Returns False for an event whose destination is still to be told, or that was changed meanwhile."""
    delivery = stored.event.delivery
    return (delivery is None or delivery.state != "pending") and store.remove(stored)
