"""Jobs of the leader for events. They queue the events of dead workers again, remove old events, and count all
events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from adapters.store import MAX_LIST
from gateway.catalog.threads import LeavableThreads
from gateway.events.event_store import EventStore
from gateway.events.records import DEAD_STATES, DELIVERING, ENDED, EventRecord, State, ended_before
from gateway.events.transitions import LOST, retried
from gateway.jobs.job_store import LEFTOVER_S, Stored
from gateway.leader.tick import Job, Tick

KEPT_S = 24 * 3600.0
DEAD_KEPT_S = 7 * 24 * 3600.0
"""Retention of dead letters in seconds. It is longer than that of other ended events, because an operator may have to
fix the cause first."""
WORKER_LEASE_S = 60.0
FORGOTTEN_S = 3600.0
"""Seconds after which the heartbeat of a dead worker is removed."""
LOST_PAUSE_S = 10.0
RETENTION_PAUSE_S = 60.0
COUNT_PAUSE_S = 30.0
COUNTED_INDEXES = ("queued", "running", *DEAD_STATES, DELIVERING)
MAX_COUNTED = 50_000
"""Number of markers in one index at which counting stops, because a store lists only 1,000 markers per request."""


def event_jobs(store: EventStore, announce: Callable[[], None]) -> list[Job]:
    """Returns the leader's jobs. `announce` is called after events were queued again."""
    # Separate threads, so that releasing lost events does not wait for removing old ones.
    releasing, removing, counting = (LeavableThreads(1) for _ in range(3))

    async def release(tick: Tick) -> None:
        try:
            await releasing.run(partial(release_lost, store, tick))
        finally:
            if tick.work:  # even if the tick has ended meanwhile
                announce()

    async def retain(tick: Tick) -> None:
        await removing.run(partial(remove_old, store, tick))

    async def count(tick: Tick) -> None:
        await counting.run(partial(count_events, store, tick))

    return [
        Job("lost_events", release, LOST_PAUSE_S),
        Job("event_retention", retain, RETENTION_PAUSE_S),
        Job("event_counts", count, COUNT_PAUSE_S),
    ]


def count_events(store: EventStore, tick: Tick) -> None:
    """Counts the events of each index for /metrics, up to MAX_COUNTED. Raises TickEnded, StoreUnavailable."""
    for index in COUNTED_INDEXES:
        count = 0
        for _ in islice(store.list_markers(f"events/{index}/"), MAX_COUNTED):
            count += 1
            if count % MAX_LIST == 0:
                tick.check()
        store.metrics.show_there(index, count)
        tick.work += count


def release_lost(store: EventStore, tick: Tick) -> None:
    """Releases the events of workers without a heartbeat for WORKER_LEASE_S. Raises TickEnded, StoreUnavailable."""
    now, workers = store.objects.now(), store.workers()
    alive = {worker for worker, last in workers.items() if now - last < WORKER_LEASE_S}
    release(store, lambda holder, _: holder not in alive, tick)
    for worker, last in workers.items():
        if now - last > FORGOTTEN_S:
            tick.check()
            store.retire(worker)


def release(store: EventStore, is_lost: Callable[[str, str], bool], tick: Tick | None = None) -> None:
    """Queues lost running events again, or fails those that may not be run again. Raises TickEnded, StoreUnavailable.

    `is_lost` gets an event's holder and id. `tick` is checked before each change, and its `work` counts the changes.
    """
    now = store.objects.now()
    for tenant in store.tenants("running"):
        for marker in store.list_markers(f"events/running/{tenant}/"):
            # A marker without its event may belong to a claim in progress.
            if not is_lost(marker.holder, marker.id) or marker.modified > now - LEFTOVER_S:
                continue
            if tick is not None:
                tick.check()
            stored = store.owner(marker)
            lost = None if stored is None else store.change(stored, retried(stored.record, LOST, now, 0.0))
            if tick is not None and lost is not None:
                tick.work += 1


def remove_old(store: EventStore, tick: Tick) -> None:
    """Removes events whose retention is over. The next tick continues where this one ends.

    Raises TickEnded, StoreUnavailable.
    """
    now = store.objects.now()
    for state in ENDED:
        before = now - kept_seconds(state)
        for tenant in store.tenants(state):
            after = ended_before(state, tenant, before)
            for marker in store.list_markers(f"events/{state}/{tenant}/", after):
                tick.check()
                stored = store.owner(marker)
                tick.work += stored is not None and _remove(store, stored)


def kept_seconds(state: State) -> float:
    return DEAD_KEPT_S if state in DEAD_STATES else KEPT_S


def _remove(store: EventStore, stored: Stored[EventRecord]) -> bool:
    """Removes an event, and returns True. Returns False if its delivery is pending, or if another process has changed
    it."""
    delivery = stored.record.delivery
    return (delivery is None or delivery.state != "pending") and store.remove(stored)
