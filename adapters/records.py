"""Small JSON records in the store, changed by compare-and-swap.

During an upgrade, and after its rollback, gateways of two releases share a registry: what a newer one has stored is
read without the fields that this one does not know. Requests and service files stay strict: there an unknown field is a
mistake that the caller hears of.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from adapters.errors import Conflict, CorruptRecord, NotFound, PreconditionFailed, StoreUnavailable
from adapters.store import Object, ObjectStore

ATTEMPTS = 100
"""Tries of one change; each round of a race has a winner, so this bounds how many writers may race."""

SECTION_DEPTH = 2
"""The record itself, and its sections."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def read_record(store: ObjectStore, key: str, kind: type[T]) -> tuple[T, str] | None:
    """Returns the record and its etag, or None if there is none. Raises StoreUnavailable, CorruptRecord."""
    stored = _find(store, key)
    return None if stored is None else (decoded(stored.data, key, kind), stored.etag)


def find_record(store: ObjectStore, key: str, kind: type[T]) -> T | None:
    """Returns the record without its etag, or None if there is none. Raises as `read_record`."""
    stored = _find(store, key)
    return None if stored is None else decoded(stored.data, key, kind)


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
    for record in read_each(store, keys, kind):
        if isinstance(record, CorruptRecord):
            raise record
        records.append(record)
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
    stay in it.
    Raises what `change` raises, and StoreUnavailable after ATTEMPTS tries.
    """
    for attempt in range(ATTEMPTS):
        stored = _find(store, key)
        record = None if stored is None else decoded(stored.data, key, kind)
        changed = change(record)
        if record is not None and changed is record:
            return changed
        if keeps_unknown and stored is not None and record is not None:
            data = encode_over(stored.data, record, changed)
        else:
            data = msgspec.json.encode(changed)
        before_commit()
        try:
            if stored is not None:
                store.put_if_match(key, data, stored.etag)
            else:
                store.put_if_absent(key, data)
            return changed
        except (Conflict, PreconditionFailed):
            # Spread the next tries of racing writers.
            time.sleep(random.uniform(0, min(0.05, 0.001 * 2 ** min(attempt, 10))))
    raise StoreUnavailable(f"the record {key} is changed by too many writers at once")


def decode_record(data: bytes, kind: type[T]) -> T:
    """Returns a record without the fields that this release does not know. Raises msgspec.MsgspecError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        unknown: list[str] = []
        filtered = _without_unknown(msgspec.json.decode(data), inspect.type_info(kind), "", unknown)
        if not unknown:
            raise
    log.warning("a newer release has stored fields that this one does not apply", extra={"fields": unknown})
    return msgspec.convert(filtered, kind)


def encode_over(stored: bytes, before_change: T, changed: T) -> bytes:
    """Returns `changed` as JSON, with the fields of `stored` that this release does not know: those of the record, and
    of its sections, such as a function's policy. What is below a section is a value: it is written as it was stored if
    it is the same, else as it is now. `before_change`: what `stored` was read as.

    A record that is deleted, or was, keeps nothing: it begins from scratch.
    """
    data = msgspec.json.encode(changed)
    if getattr(before_change, "deleted", False) or getattr(changed, "deleted", False):
        return data
    raw, before, after = msgspec.json.decode(stored), msgspec.to_builtins(before_change), msgspec.to_builtins(changed)
    return msgspec.json.encode(_carried(raw, before, after, SECTION_DEPTH))


def _carried(raw: Any, before: Any, after: Any, depth: int) -> Any:
    """Returns `after` with what `raw` has and `before` has not; `depth`: levels of mappings in which fields may be
    unknown."""
    if before == after:
        return raw
    if not depth or not all(isinstance(each, dict) for each in (raw, before, after)):
        return after
    unknown = {name: value for name, value in raw.items() if name not in before and name not in after}
    both = {name for name in after if name in before and name in raw}
    changed = {n: _carried(raw[n], before[n], v, depth - 1) if n in both else v for n, v in after.items()}
    return {**changed, **unknown}


def _without_unknown(value: Any, of: inspect.Type, at: str, unknown: list[str]) -> Any:
    """Returns `value` without the fields that the type `of` does not have; adds their paths, which begin with `at`, to
    `unknown`."""
    if isinstance(of, inspect.UnionType):
        of = next((each for each in of.types if isinstance(each, inspect.StructType)), of)
    if isinstance(of, inspect.StructType) and isinstance(value, dict):
        fields = {field.encode_name: field.type for field in of.fields}
        unknown += [f"{at}{name}" for name in value if name not in fields]
        return {n: _without_unknown(v, fields[n], f"{at}{n}.", unknown) for n, v in value.items() if n in fields}
    if isinstance(of, inspect.DictType) and isinstance(value, dict):
        return {name: _without_unknown(each, of.value_type, f"{at}{name}.", unknown) for name, each in value.items()}
    if isinstance(of, inspect.ListType | inspect.VarTupleType) and isinstance(value, list):
        return [_without_unknown(each, of.item_type, f"{at}{index}.", unknown) for index, each in enumerate(value)]
    return value
