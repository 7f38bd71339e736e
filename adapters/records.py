"""Small JSON records in the store, changed by compare-and-swap."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from adapters.errors import Conflict, CorruptRecord, NotFound, PreconditionFailed, StoreUnavailable
from adapters.store import Object, ObjectStore
from adapters.stored import decode_record, encode_over

ATTEMPTS = 100
"""Tries of one change; each round of a race has a winner, so this bounds how many writers may race."""

T = TypeVar("T")


def read_record(store: ObjectStore, key: str, kind: type[T]) -> tuple[T, str] | None:
    """Returns the record and its etag, or None if there is none. Raises StoreUnavailable, CorruptRecord."""
    found = _find(store, key)
    return None if found is None else (decoded(found.data, key, kind), found.etag)


def find_record(store: ObjectStore, key: str, kind: type[T]) -> T | None:
    """Returns the record without its etag, or None if there is none. Raises as `read_record`."""
    found = _find(store, key)
    return None if found is None else decoded(found.data, key, kind)


def _find(store: ObjectStore, key: str) -> Object | None:
    """Returns the object under `key`, or None if there is none."""
    try:
        return store.get(key)
    except NotFound:
        return None


def decoded(data: bytes, key: str, kind: type[T]) -> T:
    """Returns the record that `data` holds; `key` is for the message. Raises CorruptRecord when it can't be read."""
    try:
        return decode_record(data, kind)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"the record {key} can't be read: {error}") from None


def read_records(store: ObjectStore, keys: Sequence[str], kind: type[T]) -> list[T | None]:
    """Returns the records, in the order of `keys`; None where there is none. Raises as `read_record`."""
    records: list[T | None] = []
    for found in read_each(store, keys, kind):
        if isinstance(found, CorruptRecord):
            raise found
        records.append(found)
    return records


def read_each(store: ObjectStore, keys: Sequence[str], kind: type[T]) -> list[T | CorruptRecord | None]:
    """Returns what `read_records` does, with the error in the place of each record that can't be read. Raises
    StoreUnavailable."""

    def read(key: str) -> T | CorruptRecord | None:
        try:
            return find_record(store, key, kind)
        except CorruptRecord as error:
            return error

    if store.readers == 1:
        return [read(key) for key in keys]
    with ThreadPoolExecutor(store.readers, "records") as pool:
        return list(pool.map(read, keys))


def update_record(
    store: ObjectStore,
    key: str,
    kind: type[T],
    change: Callable[[T | None], T],
    before_commit: Callable[[], None] = lambda: None,
    *,
    keeps_unknown: bool = False,
) -> T:
    """Applies `change` to the record (None: there is none yet) until no other writer came between; returns the outcome.

    `change` may be called several times; when it returns the very object that it was given, nothing is written.
    `before_commit` is called before each attempt to write. With `keeps_unknown`, fields that a newer release has stored
    stay in it (adapters.stored).
    Raises what `change` raises, and StoreUnavailable after ATTEMPTS tries.
    """
    for attempt in range(ATTEMPTS):
        found = _find(store, key)
        known = None if found is None else decoded(found.data, key, kind)
        changed = change(known)
        if known is not None and changed is known:
            return changed
        if keeps_unknown and found is not None and known is not None:
            data = encode_over(found.data, known, changed)
        else:
            data = msgspec.json.encode(changed)
        before_commit()
        try:
            if found is not None:
                store.put_if_match(key, data, found.etag)
            else:
                store.put_if_absent(key, data)
            return changed
        except (Conflict, PreconditionFailed):
            # Spread the next tries of racing writers.
            time.sleep(random.uniform(0, min(0.05, 0.001 * 2 ** min(attempt, 10))))
    raise StoreUnavailable(f"the record {key} is changed by too many writers at once")
