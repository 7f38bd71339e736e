"""Events in the object store. Methods block."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry

from adapters.errors import Conflict, CorruptRecord, PreconditionFailed
from adapters.records import read_each, read_record
from adapters.store import MAX_LIST, ObjectInfo, ObjectStore, all_objects
from gateway.events.metrics import EventMetrics
from gateway.events.records import EventRecord, Marker, event_key, markers_of, parse_marker

LEFTOVER_S = 60.0
"""Age, by the store's clock, from which a marker that does not belong to its event is removed: its maker is not about
to change the event any more."""
SLOW_S = 20.0
"""A change that took longer writes its markers again: they may have been taken for leftovers."""
WORKERS = "events/workers/"

log = logging.getLogger("gateway")


class Stored(NamedTuple):
    event: EventRecord
    etag: str


class EventStore:
    """Of all tenants of a registry."""

    def __init__(self, store: ObjectStore, metrics: EventMetrics | None = None) -> None:
        """`metrics` are told of all that is stored; None: of their own, that nobody asks for."""
        self.objects = store
        self.metrics = metrics or EventMetrics(CollectorRegistry())

    def add(self, event: EventRecord) -> Stored | None:
        """Stores a new event. Returns None if there is one of this id."""
        began, key = monotonic(), event_key(event.tenant, event.id)
        markers = markers_of(event)
        self._mark(markers)
        try:
            etag = self.objects.put_if_absent(key, msgspec.json.encode(event))
        except Conflict:
            self._unmark(markers)
            return None
        self._mark_again(markers, began)
        self.metrics.note_added()
        return Stored(event, etag)

    def get(self, tenant: str, event_id: str) -> Stored | None:
        """Returns None if there is no such event. Raises CorruptRecord."""
        found = read_record(self.objects, event_key(tenant, event_id), EventRecord)
        return None if found is None or found[0].removed else Stored(*found)

    def change(self, stored: Stored, event: EventRecord) -> Stored | None:
        """Replaces the event. Returns None, changing nothing, if another process has changed it since it was read.

        When the store fails half-way the change may have been made all the same; then the same call ends it.
        """
        began, before, after = monotonic(), markers_of(stored.event), markers_of(event)
        key = event_key(event.tenant, event.id)
        self._mark(after - before)
        try:
            etag = self.objects.put_if_match(key, msgspec.json.encode(event), stored.etag)
        except PreconditionFailed:
            found = read_record(self.objects, key, EventRecord)
            if found is None or found[0] != event:
                self._unmark(after - before - (markers_of(found[0]) if found else frozenset()))
                return None
            etag = found[1]  # an earlier call has made the change
        self._mark_again(after - before, began)
        self._unmark(before - after)
        self.metrics.note_changed(stored.event, event)
        return Stored(event, etag)

    def remove(self, stored: Stored) -> bool:
        """Removes the event and its markers. Returns False if another process has changed it since it was read."""
        event, key = stored.event, event_key(stored.event.tenant, stored.event.id)
        try:
            removed = msgspec.structs.replace(event, removed=True)
            self.objects.put_if_match(key, msgspec.json.encode(removed), stored.etag)
        except PreconditionFailed:
            return False
        self.objects.delete(key)
        self._unmark(markers_of(event))
        return True

    def read(self, markers: Sequence[Marker]) -> list[EventRecord]:
        """Returns the events that the markers belong to; leftovers and damaged events are left out."""
        found = read_each(self.objects, [event_key(marker.tenant, marker.id) for marker in markers], EventRecord)
        return [
            event
            for event, marker in zip(found, markers, strict=True)
            if isinstance(event, EventRecord) and marker.key in markers_of(event)
        ]

    def owner(self, marker: Marker, modified: float) -> Stored | None:
        """Returns the event that the marker belongs to; None for a leftover, which is removed once it is old enough.
        `modified`: when the marker was written. Raises CorruptRecord."""
        found = read_record(self.objects, event_key(marker.tenant, marker.id), EventRecord)
        if found is not None and marker.key in markers_of(found[0]):
            return Stored(*found)
        if modified < self.objects.now() - LEFTOVER_S:
            if found is not None and found[0].removed:  # whoever removed it has died half-way
                self.objects.delete(event_key(marker.tenant, marker.id))
            self.objects.delete(marker.key)
        return None

    def readable_owner(self, marker: Marker, modified: float) -> Stored | None:
        """Does what `owner` does; a damaged event is logged, and None: the others' turn comes all the same."""
        try:
            return self.owner(marker, modified)
        except CorruptRecord as error:
            log.error("an event can't be read", extra={"event": marker.id, "why": str(error)})
            return None

    def infos(self, prefix: str, after: str = "", page: int = MAX_LIST) -> Iterator[tuple[Marker, ObjectInfo]]:
        """Yields markers whose keys begin with `prefix` and are greater than `after`; `page`: as many are listed at
        once."""
        while found := self.objects.list(prefix, after, page):
            for info in found:
                marker = parse_marker(info.key)
                if marker is not None:
                    yield marker, info
            after = found[-1].key
            if len(found) < page:
                return

    def tenants(self, index: str) -> Iterator[str]:
        """Yields the tenants that have a marker in this index."""
        after = ""
        while page := self.objects.folders(f"events/{index}/", after):
            yield from page
            after = page[-1]
            if len(page) < MAX_LIST:
                return

    def beat(self, worker: str, count: int) -> None:
        """Says that the worker lives."""
        self.objects.put(f"{WORKERS}{worker}", str(count).encode())

    def retire(self, worker: str) -> None:
        self.objects.delete(f"{WORKERS}{worker}")

    def workers(self) -> dict[str, float]:
        """Returns when each worker was last known to live, by the store's clock."""
        return {info.key.removeprefix(WORKERS): info.modified for info in all_objects(self.objects, WORKERS)}

    def _mark(self, keys: frozenset[str]) -> None:
        for key in keys:
            self.objects.put(key, b"")

    def _unmark(self, keys: frozenset[str]) -> None:
        for key in keys:
            self.objects.delete(key)

    def _mark_again(self, keys: frozenset[str], began: float) -> None:
        if monotonic() - began > SLOW_S:
            self._mark(keys)
