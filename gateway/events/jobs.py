"""What the leader does for events: it takes them from workers that died, and removes them when their time is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from adapters.store import MAX_LIST
from gateway.catalog.threads import LeavableThreads
from gateway.events.event_store import EventStore
from gateway.events.records import DEAD, DELIVERING, ENDED, EventRecord, State, ended_before
from gateway.events.transitions import LOST, retried
from gateway.jobs.job_store import LEFTOVER_S, Stored
from gateway.leader.turn import Job, Turn

KEPT_S = 24 * 3600.0
DEAD_KEPT_S = 7 * 24 * 3600.0
"""Dead letters wait longer: someone may have to mend what they failed with."""
WORKER_S = 60.0
"""For which a worker lives after its last word; it gives one far more often."""
FORGOTTEN_S = 3600.0
"""After which nothing is kept of a worker that died."""
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
        for _ in islice(store.list_markers(f"events/{index}/"), MAX_COUNTED):
            count += 1
            if count % MAX_LIST == 0:
                turn.check()
        store.metrics.show_there(index, count)
        turn.work += count


def release_lost(store: EventStore, turn: Turn) -> None:
    """Takes events from workers that have said nothing for WORKER_S. Raises TurnEnded, StoreUnavailable."""
    now, workers = store.objects.now(), store.workers()
    alive = {worker for worker, last in workers.items() if now - last < WORKER_S}
    release(store, lambda holder, _: holder not in alive, turn)
    for worker, last in workers.items():
        if now - last > FORGOTTEN_S:
            turn.check()
            store.retire(worker)


def release(store: EventStore, is_lost: Callable[[str, str], bool], turn: Turn | None = None) -> None:
    """Queues running events again for whose holder and id `is_lost`, or fails those that may not be run again. In a
    `turn` it is checked before each change and counts them. Raises TurnEnded, StoreUnavailable."""
    now = store.objects.now()
    for tenant in store.tenants("running"):
        for marker in store.list_markers(f"events/running/{tenant}/"):
            # A marker without its event may belong to a claim under way.
            if not is_lost(marker.holder, marker.id) or marker.modified > now - LEFTOVER_S:
                continue
            if turn is not None:
                turn.check()
            stored = store.owner(marker)
            lost = None if stored is None else store.change(stored, retried(stored.record, LOST, now, 0.0))
            if turn is not None and lost is not None:
                turn.work += 1


def remove_old(store: EventStore, turn: Turn) -> None:
    """Removes events that ended long enough ago. What is left at the turn's end waits for the next one.

    Raises TurnEnded, StoreUnavailable.
    """
    now = store.objects.now()
    for state in ENDED:
        before = now - kept_seconds(state)
        for tenant in store.tenants(state):
            after = ended_before(state, tenant, before)
            for marker in store.list_markers(f"events/{state}/{tenant}/", after):
                turn.check()
                stored = store.owner(marker)
                turn.work += stored is not None and _remove(store, stored)


def kept_seconds(state: State) -> float:
    return DEAD_KEPT_S if state in DEAD else KEPT_S


def _remove(store: EventStore, stored: Stored[EventRecord]) -> bool:
    """Returns False for an event whose destination is still to be told, or that was changed meanwhile."""
    delivery = stored.record.delivery
    return (delivery is None or delivery.state != "pending") and store.remove(stored)
