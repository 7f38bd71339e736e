"""Events whose worker died: found by their markers, and queued again or failed."""

from __future__ import annotations

from collections.abc import Callable

from gateway.events.event_store import LEFTOVER_S, EventStore
from gateway.events.transitions import LOST, retried
from gateway.leader.turn import Turn

WORKER_S = 60.0
"""For which a worker lives after its last word; it gives one far more often."""
FORGOTTEN_S = 3600.0
"""After which nothing is kept of a worker that died."""


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
        for marker, info in store.infos(f"events/running/{tenant}/"):
            # A marker without its event may belong to a claim under way.
            if not is_lost(marker.holder, marker.id) or info.modified > now - LEFTOVER_S:
                continue
            if turn is not None:
                turn.check()
            stored = store.readable_owner(marker, info.modified)
            lost = None if stored is None else store.change(stored, retried(stored.event, LOST, now, 0.0))
            if turn is not None and lost is not None:
                turn.work += 1
