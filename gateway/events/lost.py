"""Events whose worker died: found by their markers, and queued again or failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from adapters.errors import CorruptRecord
from gateway.events.event_store import LEFTOVER_S, EventStore, Stored
from gateway.events.transitions import LOST, retried
from gateway.leader.turn import Turn

WORKER_S = 60.0
"""For which a worker lives after its last word; it gives one far more often."""
FORGOTTEN_S = 3600.0
"""After which nothing is kept of a worker that died."""

log = logging.getLogger("gateway")


def release_lost(store: EventStore, turn: Turn) -> None:
    """Takes events from workers that have said nothing for WORKER_S. Raises TurnEnded, StoreUnavailable."""
    now, workers = store.objects.now(), store.workers()
    alive = {worker for worker, last in workers.items() if now - last < WORKER_S}
    for _ in released(store, lambda holder, _: holder not in alive, turn.check):
        turn.work += 1
    for worker, last in workers.items():
        if now - last > FORGOTTEN_S:
            turn.check()
            store.retire(worker)


def release(store: EventStore, is_lost: Callable[[str, str], bool]) -> None:
    """Queues running events again for whose holder and id `is_lost`, or fails those that may not be run again. Raises
    StoreUnavailable."""
    for _ in released(store, is_lost):
        pass


def released(
    store: EventStore, is_lost: Callable[[str, str], bool], check: Callable[[], None] = lambda: None
) -> Iterator[Stored]:
    """As `release`; yields each as it is stored then. `check` is called before each change; raises what it raises."""
    now = store.objects.now()
    for tenant in store.tenants("running"):
        for marker, info in store.infos(f"events/running/{tenant}/"):
            # A marker without its event may belong to a claim under way.
            if not is_lost(marker.holder, marker.id) or info.modified > now - LEFTOVER_S:
                continue
            check()
            try:
                stored = store.owner(marker, info.modified)
            except CorruptRecord as error:  # the others' turn comes all the same
                log.error("an event can't be read", extra={"event": marker.id, "why": str(error)})
                continue
            lost = None if stored is None else store.change(stored, retried(stored.event, LOST, now, 0.0))
            if lost is not None:
                yield lost
