"""How many files a tenant may have, and of how many bytes: held by all gateways together; no upload lists the files.

A record per tenant says the bytes of each of its files, and of each upload under way as many as it may bring. It is
changed by compare-and-swap: before an upload stores anything, when its file is there, and when a file is gone. What a
gateway that dies in between has left in it goes with the upload's other remains (gateway.batches.files). What a gateway
of an earlier release adds or deletes is found when the files are counted anew: hourly, and before a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from adapters.errors import Conflict, CorruptRecord
from adapters.records import update_record
from adapters.store import ObjectStore
from adapters.tenant_removal import data_prefix

MAX_FILES = 500
"""Files of one tenant; outputs of batches may go beyond it, as beyond the bytes, and then no batch begins."""
RECOUNT_SECONDS = 3600.0

Count = Callable[[str, Mapping[str, int]], dict[str, int]]
"""Returns the bytes of a tenant's files by id, and of uploads under way, by what is known so far of both."""


class FileSizes(msgspec.Struct, frozen=True):
    """data/<tenant>/file_sizes.json"""

    counted: float
    """When the files were last listed, by the store's clock."""
    files: dict[str, int] = {}
    """Bytes, by id."""


class FileQuota:
    """Methods block, and raise StoreUnavailable."""

    def __init__(self, store: ObjectStore, count: Count) -> None:
        self._store, self._count = store, count

    def take(self, tenant: str, file_id: str, size: int, limit: int) -> None:
        """Keeps room for an upload of at most `size` bytes. Raises Conflict where `limit` bytes or MAX_FILES do not
        leave it."""

        def taken(known: FileSizes | None) -> FileSizes:
            sizes = self._with_room(tenant, known, limit, files=1, size=size)
            return FileSizes(sizes.counted, {**sizes.files, file_id: size})

        self._update(tenant, taken)

    def check(self, tenant: str, limit: int) -> None:
        """Raises Conflict for a tenant that outputs of batches have taken beyond its limits."""
        self._update(tenant, lambda known: self._with_room(tenant, known, limit, files=0, size=0))

    def note(self, tenant: str, file_id: str, size: int | None) -> None:
        """The file has so many bytes; None: it is gone. Nothing is noted before the tenant's first upload, which
        counts."""

        def noted(known: FileSizes | None) -> FileSizes:
            known = known or FileSizes(0.0)
            if known.files.get(file_id) == size:
                return known
            others = {each: kept for each, kept in known.files.items() if each != file_id}
            return FileSizes(known.counted, others if size is None else {**others, file_id: size})

        if self._store.head(_key(tenant)) is not None:
            self._update(tenant, noted)

    def forget(self, tenant: str) -> None:
        """Begins anew with the next upload."""
        self._store.delete(_key(tenant))

    def _with_room(self, tenant: str, known: FileSizes | None, limit: int, *, files: int, size: int) -> FileSizes:
        """Returns the record, counted anew where that is due or may make room. Raises Conflict."""
        now = self._store.now()
        if known is not None and now - known.counted < RECOUNT_SECONDS and not _problem(known, limit, files, size):
            return known
        counted = FileSizes(now, self._count(tenant, {} if known is None else known.files))
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
    """Returns nothing where there is room for as many more `files` of `size` bytes."""
    total = sum(sizes.files.values()) + size
    if len(sizes.files) + files > MAX_FILES:
        return f"the tenant may have {MAX_FILES} files, and has them"
    return f"the tenant may have {limit} bytes of files, and with {size} more has {total}" if total > limit else ""


def _key(tenant: str) -> str:
    return f"{data_prefix(tenant)}file_sizes.json"
