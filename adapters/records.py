"""Small JSON records in the store, changed by compare-and-swap.

During an upgrade, and after a rollback, gateways of two releases share a registry. A record of a newer release is read
without the fields that this release does not know. Requests and service files are read strictly: an unknown field there
is a mistake, which is reported to the caller.
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
"""Maximum number of attempts at one change. In each round of a race one writer succeeds, so a change succeeds among up
to this many racing writers."""

SECTION_DEPTH = 2
"""Number of nesting levels whose unknown fields are kept: the record and its sections."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def read_record(store: ObjectStore, key: str, kind: type[T]) -> tuple[T, str] | None:
    """Returns the record and its etag; None if it does not exist. Raises StoreUnavailable or CorruptRecord."""
    stored = _find(store, key)
    return None if stored is None else (decoded(stored.data, key, kind), stored.etag)


def find_record(store: ObjectStore, key: str, kind: type[T]) -> T | None:
    """Returns the record without its etag; None if it does not exist. Raises what `read_record` does."""
    stored = _find(store, key)
    return None if stored is None else decoded(stored.data, key, kind)


def _find(store: ObjectStore, key: str) -> Object | None:
    """Returns the object under `key`; None if it does not exist."""
    try:
        return store.get(key)
    except NotFound:
        return None


def decoded(data: bytes, key: str, kind: type[T]) -> T:
    """Returns the record decoded from `data`. `key` appears in the error message. Raises CorruptRecord when it can't be
    decoded."""
    try:
        return decode_record(data, kind)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"the record {key} can't be read: {error}") from None


def read_records(store: ObjectStore, keys: Sequence[str], kind: type[T]) -> list[T | None]:
    """Returns the records in the order of `keys`; None for those that do not exist. Raises what `read_record` does."""
    records: list[T | None] = []
    for record in read_each(store, keys, kind):
        if isinstance(record, CorruptRecord):
            raise record
        records.append(record)
    return records


def read_each(store: ObjectStore, keys: Sequence[str], kind: type[T]) -> list[T | CorruptRecord | None]:
    """Returns the records in the order of `keys`, like `read_records`, with a CorruptRecord in place of each unreadable
    one. Raises StoreUnavailable."""

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
    """Applies `change` to the record by compare-and-swap, and returns the changed record.

    `change` gets the current record, or None if it does not exist. It may be called several times; if it returns the
    same object, nothing is written. `before_commit` is called before each attempt to write. `keeps_unknown`: keep the
    fields that a newer release has stored. Raises what `change` raises, and StoreUnavailable after ATTEMPTS attempts.
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
    """Returns the decoded record without the fields that this release does not know. Raises msgspec.MsgspecError."""
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
    """Returns `changed` as JSON, with those fields of `stored` that this release does not know.

    Unknown fields are kept in the record and in its sections, such as a function's policy. Deeper values are written as
    stored if they are unchanged, else as in `changed`. `before_change` is the record that was decoded from `stored`. A
    record that is or was deleted keeps no unknown fields.
    """
    data = msgspec.json.encode(changed)
    if getattr(before_change, "deleted", False) or getattr(changed, "deleted", False):
        return data
    raw, before, after = msgspec.json.decode(stored), msgspec.to_builtins(before_change), msgspec.to_builtins(changed)
    return msgspec.json.encode(_carried(raw, before, after, SECTION_DEPTH))


def _carried(raw: Any, before: Any, after: Any, depth: int) -> Any:
    """Returns `after` with the unknown fields: those that `raw` has and `before` lacks. `depth` is the number of
    nesting levels in which fields may be unknown."""
    if before == after:
        return raw
    if not depth or not all(isinstance(each, dict) for each in (raw, before, after)):
        return after
    unknown = {name: value for name, value in raw.items() if name not in before and name not in after}
    both = {name for name in after if name in before and name in raw}
    changed = {n: _carried(raw[n], before[n], v, depth - 1) if n in both else v for n, v in after.items()}
    return {**changed, **unknown}


def _without_unknown(value: Any, of: inspect.Type, at: str, unknown: list[str]) -> Any:
    """Returns `value` without the fields that type `of` lacks. Appends their paths, prefixed with `at`, to
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
