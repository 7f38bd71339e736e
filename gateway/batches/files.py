"""Tenants' files in the object store: each is a record, and parts with the content.

A file is never complete in memory or on this host's disk. Leftovers of an interrupted upload or deletion are removed by
the tenant's next upload.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from adapters.errors import Conflict, NotFound
from adapters.records import read_each, read_record, read_records
from adapters.store import ObjectStore, all_objects
from adapters.tenant_removal import data_prefix, remove_below
from gateway.batches.file_quota import FileQuota
from gateway.batches.messages import FileObject, Purpose

MAX_FILE_BYTES = 200 << 20
PART_BYTES = 8 << 20
READ_BYTES = 1 << 20
ABANDONED_SECONDS = 7200.0
"""Age, in seconds, from which an incomplete upload is removed. No upload takes that long."""
_ID_TIME = 1 << 44
"""Time in milliseconds from which ids count down, so that a listing of keys begins with the newest file."""
_ID = re.compile(r"(file-|batch_)[0-9a-f]{27}", re.ASCII)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Part of a file: the first `bytes` bytes of the object `name` in the file's folder."""

    name: str
    bytes: int


class FileRecord(msgspec.Struct, frozen=True):
    id: str
    filename: str
    purpose: Purpose
    created: float
    parts: tuple[Part, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def reply(self) -> FileObject:
        return FileObject(self.id, self.bytes, int(self.created), self.filename, self.purpose)


class FileStore:
    """Files of all tenants. Methods block; they may be called from any thread, and raise StoreUnavailable."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.quota = FileQuota(store, self._count)

    def begin(self, tenant: str, size: int, limit: int) -> str:
        """Begins an upload of at most `size` bytes. Returns the file's id.

        Raises Conflict if the tenant's files would exceed `limit` bytes or MAX_FILES.
        """
        self._sweep(tenant)
        file_id = new_id("file-", self.store.now())
        self.store.put(_upload_key(tenant, file_id), b"")
        try:
            self.quota.take(tenant, file_id, size, limit)
        except Conflict:
            self.store.delete(_upload_key(tenant, file_id))
            raise
        return file_id

    def put_part(self, tenant: str, file_id: str, name: str, data: bytes) -> Part:
        self.store.put(part_key(tenant, file_id, name), data)
        return Part(name, len(data))

    def commit(self, tenant: str, record: FileRecord) -> FileRecord:
        """Completes an upload by storing the file's record. Only then is the file listed."""
        self.store.put(_key(tenant, record.id), msgspec.json.encode(record))
        self.quota.record(tenant, record.id, record.bytes)
        self.store.delete(_upload_key(tenant, record.id))
        return record

    def abandon(self, tenant: str, file_id: str) -> None:
        """Removes an upload with all its parts, even if its `commit` failed half-way."""
        self.store.delete(_key(tenant, file_id))
        self._remove_parts(tenant, file_id)
        self.quota.record(tenant, file_id, None)
        self.store.delete(_upload_key(tenant, file_id))

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """Returns the file's record. Raises NotFound."""
        pair = read_record(self.store, _key(tenant, file_id), FileRecord) if is_id(file_id, "file-") else None
        if pair is None:
            raise NotFound(f"there is no file {file_id[:100]!r}")
        return pair[0]

    def ids(self, tenant: str) -> list[str]:
        """Returns the ids of the tenant's files, the newest first."""
        return listed_ids(self.store, data_prefix(tenant) + "files/")

    def records(self, tenant: str, ids: Sequence[str]) -> list[FileRecord]:
        """Returns the records of the files that still exist."""
        records = read_records(self.store, [_key(tenant, file_id) for file_id in ids], FileRecord)
        return [record for record in records if record is not None]

    def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file. Raises NotFound. If the process dies half-way, leftovers are removed like those of an
        upload."""
        self.get(tenant, file_id)
        self.store.put(_upload_key(tenant, file_id), b"")
        self.abandon(tenant, file_id)

    def read(self, tenant: str, record: FileRecord, start: int, length: int) -> bytes:
        """Returns `length` bytes of the content from `start`, fewer at its end. Raises NotFound for a deleted file."""
        pieces: list[bytes] = []
        for part in record.parts:
            if length and start < part.bytes:
                key, count = part_key(tenant, record.id, part.name), min(length, part.bytes - start)
                pieces.append(self.store.get_range(key, start, count))
                start, length = 0, length - count
            else:
                start = max(0, start - part.bytes)
        return b"".join(pieces)

    def _sweep(self, tenant: str) -> None:
        before = self.store.now() - ABANDONED_SECONDS
        for info in self.store.list(f"{data_prefix(tenant)}uploads/", limit=100):
            if info.modified < before:
                file_id = info.key.rpartition("/")[2]
                if self.store.head(_key(tenant, file_id)) is None:
                    self._remove_parts(tenant, file_id)
                    self.quota.record(tenant, file_id, None)
                self.store.delete(info.key)

    def _count(self, tenant: str, last: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of files and uploads, for FileQuota.

        Records of files in `last` are not read; damaged records are left out.
        """
        folder = f"{data_prefix(tenant)}uploads/"  # listed first, so that an upload that ends meanwhile is not missed
        under_way = {info.key.removeprefix(folder) for info in all_objects(self.store, folder)}
        ids = self.ids(tenant)
        records = read_each(self.store, [_key(tenant, each) for each in ids if each not in last], FileRecord)
        new = {record.id: record.bytes for record in records if isinstance(record, FileRecord)}
        there = under_way.union(ids)
        return new | {file_id: size for file_id, size in last.items() if file_id in there}

    def _remove_parts(self, tenant: str, file_id: str) -> None:
        remove_below(self.store, part_key(tenant, file_id, ""))


def piece_starts(size: int) -> Iterator[tuple[int, int]]:
    """Yields (start, length), in bytes, of each piece in which a file of `size` bytes is read."""
    for start in range(0, size, READ_BYTES):
        yield start, min(READ_BYTES, size - start)


def new_id(prefix: str, now: float) -> str:
    """Returns a new id that begins with `prefix`. Ids made later come first in a listing. `now`: Unix time."""
    return f"{prefix}{_ID_TIME - int(now * 1000):011x}{secrets.token_hex(8)}"


def is_id(text: str, prefix: str) -> bool:
    """Returns whether `text` has the form of an id with this prefix. Such a text is safe as part of a key."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def part_key(tenant: str, file_id: str, name: str) -> str:
    return f"{data_prefix(tenant)}parts/{file_id}/{name}"


def listed_ids(store: ObjectStore, folder: str) -> list[str]:
    """Returns the names of all records directly in a folder, in the order of their keys."""
    return [info.key.removeprefix(folder).removesuffix(".json") for info in all_objects(store, folder)]


def _key(tenant: str, file_id: str) -> str:
    return f"{data_prefix(tenant)}files/{file_id}.json"


def _upload_key(tenant: str, file_id: str) -> str:
    return f"{data_prefix(tenant)}uploads/{file_id}"
