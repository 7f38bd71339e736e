"""The ObjectStore protocol: everything that the registry needs from a directory or S3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from adapters.errors import InvalidRequest

_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}", re.ASCII)
MAX_KEY = 1024
"""Maximum length of a key in bytes, as on S3."""
MAX_LIST = 1000
"""Maximum number of entries in one listing."""


class Object(msgspec.Struct, frozen=True):
    """Complete content of an object, and its etag."""

    data: bytes
    etag: str


class ObjectInfo(msgspec.Struct, frozen=True):
    """Key, size in bytes and last write of an object."""

    key: str
    size: int
    modified: float
    """Unix time of the last write, by the store's clock."""


class RangeReader(Protocol):
    """Part of ObjectStore that is enough to read an artifact's header."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns `length` bytes from offset `start`; fewer if the object ends before. Raises NotFound."""


Arrived = Callable[[int], None]


class ObjectStore(Protocol):
    """Store of objects by key, in a directory or S3.

    Keys are `/`-separated segments of letters, digits, `.`, `_` and `-` (no leading `.`). No key is a folder of
    another. Every write is atomic, and durable when it returns: readers see the old or the new content, never a part.
    Conditional writes hold between threads, processes and hosts. An etag changes if and only if the content changes.
    Calls block. Each raises StoreUnavailable when the store can't answer in bounded time (a write may have taken effect
    nevertheless), and InvalidRequest for a malformed key.
    """

    readers: int
    """Recommended number of small objects to read in parallel."""

    def now(self) -> float:
        """Returns the Unix time by the store's clock. The clocks of hosts may differ from it, and from each other, by
        hours."""

    def get(self, key: str) -> Object:
        """Returns the complete object; meant for records, not for weights. Raises NotFound."""

    def head(self, key: str) -> ObjectInfo | None:
        """Returns the object's size and time of last write; None if it does not exist."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Returns `length` bytes from offset `start`; fewer if the object ends before. Raises NotFound."""

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        """Fills `buffer` (contiguous, writable) from offset `start`; returns the number of bytes read, fewer if the
        object ends before.

        `arrived` is called by the calling thread as bytes arrive, with the number of bytes present from the buffer's
        start. That number falls when bytes are read again. An exception that `arrived` raises ends the read and is
        raised here. Raises NotFound. After the call, however it ends, nothing writes to `buffer` any more.
        """

    def put(self, key: str, data: bytes | Path) -> str:
        """Writes the object unconditionally. Returns the new etag."""

    def put_if_absent(self, key: str, data: bytes | Path) -> str:
        """Writes the object if it does not exist. Returns the etag. Raises Conflict if it exists."""

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replaces the object if it has this etag. Returns the new etag. Raises PreconditionFailed otherwise."""

    def list(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[ObjectInfo]:
        """Returns at most `limit` objects whose keys start with `prefix` and are greater than `after`, in byte order of
        keys."""

    def folders(self, prefix: str, after: str = "", limit: int = MAX_LIST) -> Sequence[str]:
        """Returns the names of the folders directly below `prefix`, which ends with "/", ordered as name + "/".

        Only names with name + "/" > `after` + "/" are returned, `limit` at most.
        """

    def delete(self, key: str) -> None:
        """Removes the object. Does nothing if it does not exist."""

    def delete_older(self, key: str, before: float) -> bool:
        """Removes the object if its last write was before Unix time `before`. Returns whether it was removed.

        Content that is written at the same moment may be lost; the writer detects that by `missing`.
        """

    def missing(self, keys: Sequence[str]) -> Sequence[str]:
        """Returns those of `keys` whose objects no longer exist. The caller has just written all of these objects.

        Waits first for calls of `delete_older` on them that are in progress. An object that is found can no longer be
        removed by a `delete_older` call that began earlier than this call.
        """


def all_objects(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    """Yields every object below the prefix, listing one page at a time. Listed objects may be deleted meanwhile."""
    after = ""
    while page := store.list(prefix, after):
        yield from page
        after = page[-1].key


def is_key(text: str) -> bool:
    """Returns whether the text is a valid object key, or a valid part of one."""
    return len(text) <= MAX_KEY and all(_SEGMENT.fullmatch(part) for part in text.split("/"))


def check_key(key: str) -> None:
    """Raises InvalidRequest unless `key` is well-formed, so that no key can point outside the store."""
    if not is_key(key):
        raise InvalidRequest("key", f"malformed object key {key[:200]!r}")
