"""Events, which are asynchronous calls, in the object store. Methods block."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from math import inf
from time import monotonic

import msgspec
from prometheus_client import CollectorRegistry

from adapters.errors import PreconditionFailed
from adapters.records import find_record, read_each
from adapters.store import MAX_LIST, ObjectStore, all_objects
from gateway.events.metrics import EventMetrics
from gateway.events.records import EventRecord, event_key, folder, markers_of, parse_marker
from gateway.jobs.job_store import JobStore, Marker, Stored
from gateway.jobs.poller import PollResult, function_of
from gateway.jobs.windows import Function

WORKERS = "events/workers/"
MAX_TENANTS_A_POLL = 200
MAX_POLL_S = 3.0
"""Maximum seconds of one poll. The next poll continues after the last tenant that was read."""
LISTED = 128
"""Number of a tenant's earliest markers from which a poll chooses the events that it returns."""
MAX_TENANT_EVENTS = 32


class EventStore(JobStore[EventRecord]):
    """Events of all tenants of a registry."""

    def __init__(self, store: ObjectStore, metrics: EventMetrics | None = None) -> None:
        """`metrics` count all changes of events; None if they are not exported."""
        self.metrics = metrics or EventMetrics(CollectorRegistry())
        super().__init__(store, EventRecord, event_key, markers_of, self.metrics.record_change)

    def find(self, tenant: str, job_id: str) -> Stored[EventRecord] | None:
        stored = super().find(tenant, job_id)
        return None if stored is None or stored.record.removed else stored

    def remove(self, stored: Stored[EventRecord]) -> bool:
        """Removes the event and its markers. Returns False if another process has changed it since it was read."""
        event, key = stored.record, event_key(stored.record.tenant, stored.record.id)
        try:
            removed = msgspec.structs.replace(event, removed=True)
            self.objects.put_if_match(key, msgspec.json.encode(removed), stored.etag)
        except PreconditionFailed:
            return False
        self.objects.delete(key)
        self._unmark(markers_of(event))
        return True

    def records(self, markers: Sequence[Marker]) -> list[EventRecord]:
        """Returns the events to which the markers belong. Leftover markers and damaged events are skipped."""
        records = read_each(self.objects, [event_key(marker.tenant, marker.id) for marker in markers], EventRecord)
        return [
            event
            for event, marker in zip(records, markers, strict=True)
            if isinstance(event, EventRecord) and marker.key in markers_of(event)
        ]

    def list_markers(self, prefix: str, after: str = "", page: int = MAX_LIST) -> Iterator[Marker]:
        """Yields markers whose keys begin with `prefix` and are greater than `after`. Each request to the store lists
        `page` of them."""
        while infos := self.objects.list(prefix, after, page):
            for info in infos:
                if (marker := parse_marker(info.key, info.modified)) is not None:
                    yield marker
            after = infos[-1].key
            if len(infos) < page:
                return

    def tenants(self, index: str) -> Iterator[str]:
        """Yields the tenants that have a marker in this index."""
        after = ""
        while page := self.objects.folders(f"events/{index}/", after):
            yield from page
            after = page[-1]
            if len(page) < MAX_LIST:
                return

    def poll(self, index: str, after: str, now: float, closed: Collection[Function] = frozenset()) -> PollResult:
        """Returns the due events of an index, from the first tenant after `after` on. Events of `closed` functions are
        left out. `now`: Unix time by the store's clock."""
        by_tenant: dict[str, list[Marker]] = {}
        next_in, until = inf, monotonic() + MAX_POLL_S
        tenants = self.objects.folders(f"events/{index}/", after, MAX_TENANTS_A_POLL)
        next_after = tenants[-1] if len(tenants) == MAX_TENANTS_A_POLL else ""
        for tenant in tenants:
            listed = list(islice(self.list_markers(folder(index, tenant), page=LISTED), LISTED))
            ready = [each for each in listed if each.time <= now and function_of(each) not in closed]
            next_in = min(next_in, next((each.time - now for each in listed if each.time > now), inf))
            # Starts at a random due event, so that workers rarely take the same ones.
            skipped = random.randrange(len(ready) - MAX_TENANT_EVENTS + 1) if len(ready) > MAX_TENANT_EVENTS else 0
            by_tenant[tenant] = [*ready[skipped : skipped + MAX_TENANT_EVENTS]]
            if monotonic() >= until:
                next_after = tenant
                break
        return PollResult(by_tenant, next_in, next_after)

    def beat(self, worker: str, count: int) -> None:
        """Renews the worker's lease on the events that it runs. `count`: number of these events."""
        self.objects.put(f"{WORKERS}{worker}", str(count).encode())

    def retire(self, worker: str) -> None:
        self.objects.delete(f"{WORKERS}{worker}")

    def workers(self) -> dict[str, float]:
        """Returns the time of each worker's last heartbeat, in Unix time by the store's clock."""
        return {info.key.removeprefix(WORKERS): info.modified for info in all_objects(self.objects, WORKERS)}

    def _remove_leftover(self, marker: Marker) -> None:
        key = event_key(marker.tenant, marker.id)
        event = find_record(self.objects, key, EventRecord)
        if event is not None and event.removed:  # the process that removed it died half-way
            self.objects.delete(key)
        super()._remove_leftover(marker)
