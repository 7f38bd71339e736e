"""Quota of a tenant's files, in number and bytes, shared by all gateways. No upload has to list the files.

A record per tenant has the size of each file and the maximum size of each upload in progress. It is changed by
compare-and-swap: before an upload stores anything, when its file is complete, and when a file is deleted. If a gateway
dies in between, its entries are removed with the upload's other leftovers (gateway.batches.files). A write that reaches
the store after its upload was abandoned is noticed when the files are counted again, hourly and before a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from adapters.errors import Conflict, CorruptRecord
from adapters.records import update_record
from adapters.store import ObjectStore
from adapters.tenant_removal import data_prefix

MAX_FILES = 500
"""Maximum files of one tenant. Outputs of batches may exceed this limit and the limit of bytes. In that case no further
batch of the tenant starts."""
RECOUNT_SECONDS = 3600.0

Count = Callable[[str, Mapping[str, int]], dict[str, int]]
"""Function that returns the sizes in bytes of a tenant's files and uploads in progress, by id. It gets the tenant and
the sizes of the last count."""


class FileSizes(msgspec.Struct, frozen=True):
    """Content of data/<tenant>/file_sizes.json."""

    counted: float
    """Time of the last count (store clock)."""
    files: dict[str, int] = {}


class FileQuota:
    """Quota of all tenants. Methods block, and raise StoreUnavailable."""

    def __init__(self, store: ObjectStore, count: Count) -> None:
        self._store, self._count = store, count

    def take(self, tenant: str, file_id: str, size: int, limit: int) -> None:
        """Reserves room for an upload of at most `size` bytes.

        Raises Conflict if `limit` bytes or MAX_FILES would be exceeded.
        """

        def reserved(current: FileSizes | None) -> FileSizes:
            sizes = self._with_room(tenant, current, limit, files=1, size=size)
            return FileSizes(sizes.counted, {**sizes.files, file_id: size})

        self._update(tenant, reserved)

    def check(self, tenant: str, limit: int) -> None:
        """Checks that outputs of batches do not exceed the tenant's limits. Raises Conflict."""
        self._update(tenant, lambda current: self._with_room(tenant, current, limit, files=0, size=0))

    def record(self, tenant: str, file_id: str, size: int | None) -> None:
        """Records the size of a file in bytes; None if it was deleted. Does nothing before the tenant's first
        upload."""

        def recorded(current: FileSizes | None) -> FileSizes:
            current = current or FileSizes(0.0)
            if current.files.get(file_id) == size:
                return current
            other_files = {each: count for each, count in current.files.items() if each != file_id}
            return FileSizes(current.counted, other_files if size is None else {**other_files, file_id: size})

        if self._store.head(_key(tenant)) is not None:
            self._update(tenant, recorded)

    def forget(self, tenant: str) -> None:
        """Removes the record; the next upload counts the files again."""
        self._store.delete(_key(tenant))

    def _with_room(self, tenant: str, current: FileSizes | None, limit: int, *, files: int, size: int) -> FileSizes:
        """Returns the tenant's record. The files are counted again if that is due, or if a new count may make room.
        Raises Conflict if there is no room."""
        now = self._store.now()
        if (
            current is not None
            and now - current.counted < RECOUNT_SECONDS
            and not _problem(current, limit, files, size)
        ):
            return current
        counted = FileSizes(now, self._count(tenant, {} if current is None else current.files))
        if problem := _problem(counted, limit, files, size):
            raise Conflict(f"{problem}; delete some first")
        return counted

    def _update(self, tenant: str, change: Callable[[FileSizes | None], FileSizes]) -> None:
        try:
            update_record(self._store, _key(tenant), FileSizes, change)
        except CorruptRecord:
            self.forget(tenant)
            update_record(self._store, _key(tenant), FileSizes, change)


def _problem(sizes: FileSizes, limit: int, files: int, size: int) -> str:
    """Returns which limit would be exceeded by `files` more files of `size` bytes together; empty if none would."""
    total = sum(sizes.files.values()) + size
    if len(sizes.files) + files > MAX_FILES:
        return f"the tenant may have {MAX_FILES} files, and has them"
    return f"the tenant may have {limit} bytes of files, and with {size} more has {total}" if total > limit else ""


def _key(tenant: str) -> str:
    return f"{data_prefix(tenant)}file_sizes.json"
