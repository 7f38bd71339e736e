"""Jobs in the object store: a record for each, and empty marker objects that list them.

Markers are written before the record needs them, and removed once it no longer does. So each record always has its own
markers. A marker that no record needs is a leftover of a failed change, or belongs to a change in progress.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Generic, NamedTuple, TypeVar

import msgspec

from adapters.errors import Conflict, CorruptRecord, PreconditionFailed
from adapters.records import read_record
from adapters.store import ObjectStore

LEFTOVER_S = 60.0
"""Age, in seconds by the store's clock, after which a leftover is removed. Its writer can't be active any more."""
SLOW_S = 20.0
"""Seconds after which a change must write its markers again, because they may have been removed as leftovers."""

log = logging.getLogger("gateway")


class JobRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """First fields of every job's record."""

    id: str
    tenant: str


R = TypeVar("R", bound=JobRecord)


class Marker(msgspec.Struct, frozen=True):
    """Marker of a job: an empty object whose key contains these fields. Times are Unix time (store clock)."""

    key: str
    modified: float
    tenant: str
    id: str
    holder: str = ""
    function: str = ""
    time: float = 0.0
    """Time of the next attempt if the job is queued. For any other job, the time at which it got its state."""


class Stored(NamedTuple, Generic[R]):
    record: R
    etag: str


class JobStore(Generic[R]):
    """Jobs of one kind, of all tenants of a registry. Methods block and raise StoreUnavailable.

    `key` returns the key of a record by tenant and id, `markers` the keys of all markers that a record needs.
    `on_change` is called after each change with the record before it, None for a new one, and after it.
    """

    def __init__(
        self,
        objects: ObjectStore,
        kind: type[R],
        key: Callable[[str, str], str],
        markers: Callable[[R], frozenset[str]],
        on_change: Callable[[R | None, R], None] = lambda _before, _now: None,
    ) -> None:
        self.objects = objects
        self._on_change = on_change
        self._kind, self._key, self._markers = kind, key, markers

    def add(self, record: R) -> Stored[R] | None:
        """Stores a new job and returns it. Returns None if a job with this id exists."""
        started, markers = monotonic(), self._markers(record)
        self._mark(markers)
        try:
            etag = self.objects.put_if_absent(self._key(record.tenant, record.id), msgspec.json.encode(record))
        except Conflict:
            self._unmark(markers)
            return None
        return self._stored(None, record, etag, started)

    def find(self, tenant: str, job_id: str) -> Stored[R] | None:
        """Returns the stored job; None if it does not exist. Raises CorruptRecord."""
        pair = read_record(self.objects, self._key(tenant, job_id), self._kind)
        return None if pair is None else Stored(*pair)

    def change(self, stored: Stored[R], record: R) -> Stored[R] | None:
        """Replaces the record. Returns None, without a change, if another process has changed it since it was read.

        If the store fails half-way, the change may still have been made. The same call then completes it.
        """
        started, new = monotonic(), self._markers(record) - self._markers(stored.record)
        self._mark(new)
        try:
            key = self._key(record.tenant, record.id)
            etag = self.objects.put_if_match(key, msgspec.json.encode(record), stored.etag)
        except PreconditionFailed:
            current = self.find(record.tenant, record.id)
            if current is None or current.record != record:
                self._unmark(new - (self._markers(current.record) if current else frozenset()))
                return None
            etag = current.etag  # an earlier call has made the change
        return self._stored(stored.record, record, etag, started)

    def owner(self, marker: Marker) -> Stored[R] | None:
        """Returns the job that needs the marker. Returns None for a leftover, and removes it if it is older than
        LEFTOVER_S.

        Returns None for a damaged record as well, and logs it, so that it does not block other jobs.
        """
        try:
            stored = self.find(marker.tenant, marker.id)
        except CorruptRecord as error:
            log.error("a job can't be read", extra={"job": marker.id, "why": str(error)})
            return None
        if stored is not None and marker.key in self._markers(stored.record):
            return stored
        if marker.modified < self.objects.now() - LEFTOVER_S:
            self._remove_leftover(marker)
        return None

    def _stored(self, before: R | None, record: R, etag: str, started: float) -> Stored[R]:
        """Updates the markers after a change that began at `started` (monotonic seconds)."""
        old, new = frozenset() if before is None else self._markers(before), self._markers(record)
        if monotonic() - started > SLOW_S:
            self._mark(new - old)
        self._unmark(old - new)
        self._on_change(before, record)
        return Stored(record, etag)

    def _remove_leftover(self, marker: Marker) -> None:
        self.objects.delete(marker.key)

    def _mark(self, keys: frozenset[str]) -> None:
        for key in keys:
            self.objects.put(key, b"")

    def _unmark(self, keys: frozenset[str]) -> None:
        for key in keys:
            self.objects.delete(key)
