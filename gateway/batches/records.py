"""Records of batches, and their markers: one for each batch that has not ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from adapters.errors import Conflict, NotFound
from adapters.records import read_records, update_record
from adapters.store import ObjectStore, all_objects
from adapters.tenant_removal import data_prefix
from cluster.errors import ServiceError
from gateway.batches.files import Part, is_id, listed_ids, new_id
from gateway.batches.messages import (
    ENDED,
    WINDOW_SECONDS,
    Batch,
    BatchProblem,
    BatchProblems,
    BatchRequest,
    Endpoint,
    RequestCounts,
    Status,
)
from gateway.jobs.job_store import JobRecord, JobStore, Marker, Stored

MAX_BATCHES = 500
"""Maximum batches of one tenant; beyond it the oldest ended ones are removed."""
MAX_OPEN_BATCHES = 50
MARKERS = "open_batches/"


class BatchRecord(JobRecord, frozen=True, kw_only=True):
    """Record of a batch. Only the holder of the lease changes it, except for a request to cancel."""

    endpoint: Endpoint
    input_file: str
    created: float
    expires: float
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    key_id: str | None = None
    by_admin: bool = False
    at: dict[str, float] = msgspec.field(default_factory=dict)
    """Unix time at which the batch got each status it has had."""
    problems: tuple[BatchProblem, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    done: bytes = b""
    """Bytes with one bit per call, in the file's order. A bit is 1 if the call's reply is in `output` or `errors`."""
    output: tuple[Part, ...] = ()
    errors: tuple[Part, ...] = ()
    output_id: str
    error_id: str
    ends_as: Status | None = None
    """Final status that the batch will get; None while further calls may start."""

    holder: str = ""
    claim: int = 0
    """Number of times the batch was claimed."""
    writes: int = 0
    """Number of writes of the record. It makes each ETag unique, so a holder that no longer renews its lease is
    recognized by an unchanged ETag."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def with_status(self, status: Status, now: float) -> BatchRecord:
        return msgspec.structs.replace(self, status=status, at={**self.at, status: now})

    def reply(self) -> Batch:
        ended = self.ended
        times: dict[str, Any] = {f"{name}_at": int(when) for name, when in self.at.items()}
        return Batch(
            id=self.id,
            endpoint=self.endpoint,
            errors=BatchProblems(list(self.problems)) if self.problems else None,
            input_file_id=self.input_file,
            completion_window="24h",
            status=self.status,
            output_file_id=self.output_id if ended and self.output else None,
            error_file_id=self.error_id if ended and self.errors else None,
            created_at=int(self.created),
            expires_at=int(self.expires),
            request_counts=RequestCounts(self.total, self.completed, self.failed),
            metadata=self.metadata,
            **{name: when for name, when in times.items() if name in Batch.__struct_fields__},
        )


class BatchStore(JobStore[BatchRecord]):
    """Batches of all tenants of a registry. Each batch that has not ended has a marker."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store, BatchRecord, _key, _markers)

    def create(self, tenant: str, request: BatchRequest, key_id: str | None, *, by_admin: bool) -> BatchRecord:
        """Stores a new batch and returns its record. Raises ServiceError `conflict` if the tenant has MAX_OPEN_BATCHES
        batches that have not ended."""
        if len(self.objects.list(f"{MARKERS}{tenant}/", limit=MAX_OPEN_BATCHES)) >= MAX_OPEN_BATCHES:
            why = f"{MAX_OPEN_BATCHES} batches of the tenant have not ended, the most that it may have"
            raise ServiceError("conflict", why)
        self._forget_oldest(tenant)
        now = self.objects.now()
        record = BatchRecord(
            id=new_id("batch_", now),
            tenant=tenant,
            endpoint=request.endpoint,
            input_file=request.input_file_id,
            created=now,
            expires=now + WINDOW_SECONDS,
            metadata=request.metadata,
            key_id=key_id,
            by_admin=by_admin,
            output_id=new_id("file-", now),
            error_id=new_id("file-", now),
        )
        if self.add(record) is None:
            raise Conflict(f"there is a batch {record.id} already")
        return record

    def get(self, tenant: str, batch_id: str) -> BatchRecord:
        """Returns the batch's record. Raises NotFound."""
        stored = self.find(tenant, batch_id) if is_id(batch_id, "batch_") else None
        if stored is None:
            raise NotFound(f"there is no batch {batch_id[:100]!r}")
        return stored.record

    def ids(self, tenant: str) -> list[str]:
        """Returns the ids of the tenant's batches, the newest first."""
        return listed_ids(self.objects, _folder(tenant))

    def records(self, tenant: str, ids: Sequence[str]) -> list[BatchRecord]:
        """Returns the records of the batches that still exist."""
        records = read_records(self.objects, [self._key(tenant, batch_id) for batch_id in ids], BatchRecord)
        return [record for record in records if record is not None]

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Requests the cancellation of a batch, unless it is already ending. Returns its record.

        Raises NotFound, and ServiceError `conflict` for a batch with another final status.
        """
        self.get(tenant, batch_id)

        def change(record: BatchRecord | None) -> BatchRecord:
            if record is None:
                raise NotFound(f"there is no batch {batch_id!r}")
            if record.ended and record.status != "cancelled":
                raise ServiceError("conflict", f"the batch has ended: it is {record.status}")
            if record.status not in ("validating", "in_progress"):
                return record
            now = self.objects.now()
            return msgspec.structs.replace(record.with_status("cancelling", now), writes=record.writes + 1)

        return update_record(self.objects, self._key(tenant, batch_id), BatchRecord, change)

    def change(self, stored: Stored[BatchRecord], record: BatchRecord) -> Stored[BatchRecord] | None:
        return super().change(stored, msgspec.structs.replace(record, writes=record.writes + 1))

    def open_batches(self) -> list[Marker]:
        """Returns the markers of all batches that have not ended, each tenant's oldest first."""
        markers: list[Marker] = []
        for info in all_objects(self.objects, MARKERS):
            tenant, _, batch_id = info.key.removeprefix(MARKERS).partition("/")
            markers.append(Marker(info.key, info.modified, tenant, batch_id))
        return sorted(markers, key=lambda marker: marker.id, reverse=True)

    def _forget_oldest(self, tenant: str) -> None:
        surplus = self.ids(tenant)[MAX_BATCHES - 1 :]
        for record in self.records(tenant, surplus):
            if record.ended:
                self.objects.delete(self._key(tenant, record.id))


def bits_for(count: int) -> bytearray:
    return bytearray((count + 7) // 8)


def _folder(tenant: str) -> str:
    return f"{data_prefix(tenant)}batches/"


def _key(tenant: str, batch_id: str) -> str:
    return f"{_folder(tenant)}{batch_id}.json"


def _markers(record: BatchRecord) -> frozenset[str]:
    return frozenset() if record.ended else frozenset({f"{MARKERS}{record.tenant}/{record.id}"})
