"""The object store protocol: all that the registry needs of a directory or of S3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from adapters.errors import InvalidRequest

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}", re.ASCII)
MAX_KEY = 1024
"""Bytes in a key, as on S3."""
MAX_LIST = 1000
"""Most entries of one listing."""


class Object(msgspec.Struct, frozen=True):
    """An object's whole content and the tag of that content."""

    data: bytes
    etag: str


class ObjectInfo(msgspec.Struct, frozen=True):
    key: str
    size: int
    modified: float
    """Unix time of the last write, by the store's clock."""


class RangeReader(Protocol):
    """Part of a store that reading an artifact's header needs."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns `length` bytes from `start`, fewer where the object ends. Raises NotFound."""


Arrived = Callable[[int], None]


class ObjectStore(Protocol):
    """Keys are `/`-separated segments of letters, digits, `.`, `_`, `-` (no leading `.`); none is a folder of another.

    Every write is atomic and durable when it returns: readers see the old content or the new, never a part. Conditional
    writes hold between threads, processes and hosts. An etag changes whenever the content does, and only then. Calls
    block; each raises StoreUnavailable when the store can't answer in bounded time (a write may have taken effect all
    the same), InvalidRequest for a malformed key.
    """

    readers: int
    """Small objects that are best read at once."""

    def now(self) -> float:
        """Returns Unix time by the store's clock: hosts' own clocks may be hours away from it, and from each
        other's."""

    def get(self, key: str) -> Object:
        """Returns the whole object: for records, not for weights. Raises NotFound."""

    def head(self, key: str) -> ObjectInfo | None:
        """Returns the object's size and the time of its last write, or None if there is no such object."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns `length` bytes from `start`, fewer where the object ends. Raises NotFound."""

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        """Fills `buffer` (contiguous, writable) from byte `start`; returns how many bytes there were before the end.

        `arrived` is called by the calling thread as bytes come, with how many from the buffer's start are there; fewer
        than before when they are read again. What it raises ends the read, and is raised here. Raises NotFound. Nothing
        writes to `buffer` any more when this ends, in whichever way.
        """

    def put(self, key: str, data: bytes | Path) -> str:
        """Writes unconditionally; returns the etag."""

    def put_if_absent(self, key: str, data: bytes | Path) -> str:
        """Writes if there is no such object; returns the etag. Raises Conflict."""

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replaces the content that has this etag; returns the new one. Raises PreconditionFailed."""

    def list(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[ObjectInfo]:
        """Lists at most `limit` objects whose keys start with `prefix` and are greater than `after`, ascending by
        bytes."""

    def folders(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[str]:
        """Returns the names n for which keys `prefix` + n + "/..." exist (`prefix` ends with "/"), ascending as n +
        "/".

        Only names with n + "/" > `after` + "/" are listed, at most `limit`.
        """

    def delete(self, key: str) -> None:
        """Removes the object; no error if there is none."""

    def delete_older(self, key: str, before: float) -> bool:
        """Removes the object if its last write was before that Unix time; returns whether it was removed.

        What is written at that moment may be lost all the same: `missing` reports it to its writer.
        """

    def missing(self, keys: Sequence[str]) -> Sequence[str]:
        """Returns which of these objects, written by the caller, are gone; the others no `delete_older` that began
        before removes any more. Waits for removals that are under way."""


def all_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """Yields every object below the prefix, listed a page at a time. Those that are listed may be deleted meanwhile."""
    after = ""
    while page := store.list(prefix, after):
        yield from page
        after = page[-1].key


def is_key(text: str) -> bool:
    """Returns whether the text can be an object's key, or a part of one between slashes."""
    return len(text) <= MAX_KEY and all(_SEGMENT.fullmatch(part) for part in text.split("/"))


def check_key(key: str) -> None:
    """Raises InvalidRequest unless `key` is well-formed, so that no key can leave the store."""
    if not is_key(key):
        raise InvalidRequest("key", f"malformed object key {key[:200]!r}")
