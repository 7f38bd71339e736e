"""Objects in the registry that contain usage, and their names.

tenants/<tenant>/usage/<hour>/<gateway>-<part>.json             counts of one journal, written by its gateway only
tenants/<tenant>/usage/<hour>/<gateway>-<part>-<changes>.json   newer version of it, from a late gateway
tenants/<tenant>/usage/days/<day>-<id>.json                     merged closed hours
tenants/<tenant>/usage/months/<month>-<number>.json             merged closed days
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

import msgspec

from adapters.errors import StoreUnavailable
from adapters.store import ObjectInfo
from gateway.usage.cells import Cell, Cells
from gateway.usage.counts import Functions, UsageCounts
from gateway.usage.hours import hour_start

FORMAT = 1
"""Format version of merged objects; newer ones are refused."""
DAY = len("2026-11-21")
MONTH = len("2026-11")
"""Lengths of the names of days and months. An hour's name begins with its day's, which begins with its month's."""


class UsageRecord(msgspec.Struct, frozen=True):
    """Content of an hour's object from one journal."""

    functions: Functions


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Cell of a merged object: indices into its `hours` and `sources`, then the counters."""

    hour: int
    source: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cold_starts: int
    device_seconds: float
    device_gb_seconds: float
    host_gb_seconds: float
    device_pinned_gb_seconds: float
    host_pinned_gb_seconds: float


class MergedRecord(msgspec.Struct, frozen=True):
    """Content of a day's or month's object: many hours of many journals."""

    format: int
    sealed: bool
    """True if nothing is added any more, because the object is about to be merged and removed."""
    hours: list[str]
    sources: list[str]
    functions: dict[str, dict[str, list[Row]]]


def usage_folder(tenant: str) -> str:
    return f"tenants/{tenant}/usage/"


def days_folder(tenant: str) -> str:
    return usage_folder(tenant) + "days/"


def months_folder(tenant: str) -> str:
    return usage_folder(tenant) + "months/"


def day_key(folder: str, day: str) -> str:
    """Returns a new, unique key for a day's object. Since keys are not reused, a late removal can't hit a newer
    object."""
    return f"{folder}{day}-{secrets.token_hex(8)}.json"


def month_key(folder: str, month: str, number: int) -> str:
    """Returns the key of the month's next object, number `number`.

    Two compactors that begin the same object compute the same key, so the second one is refused. Months are never
    removed, so no number is reused.
    """
    return f"{folder}{month}-{number:04d}.json"


def usage_key(tenant: str, hour: str, gateway: str, part: int, late: int | None = None) -> str:
    """Returns the key of an hour's object from one journal.

    `late`: number of changes in the content, for a late object; each of its versions has its own name.
    """
    suffix = "" if late is None else f"-{late}"
    return f"{usage_folder(tenant)}{hour}/{gateway}-{part}{suffix}.json"


def source_of(key: str) -> tuple[str, str] | None:
    """Returns the hour and the source in the key of an hour's object; None for any other key."""
    *_, hour, name = key.split("/")
    try:
        hour_start(hour)
    except ValueError:
        return None
    return hour, "-".join(name.removesuffix(".json").split("-")[:2])


def pages(
    list_objects: Callable[[str, str, int], Sequence[ObjectInfo]], folder: str, low: str, high: str, size: int
) -> Iterator[list[ObjectInfo]]:
    """Yields lists of up to `size` objects whose names are between `low` and `high`, both exclusive.

    `list_objects`: a function like ObjectStore.list.
    """
    after, more = folder + low, True
    while more:
        listed = list_objects(folder, after, size)
        below = [info for info in listed if info.key < folder + high]
        yield below
        more = len(below) == size
        after = listed[-1].key if listed else after


def decode_hour(key: str, data: bytes) -> Cells:
    """Returns the cells of an hour's object; none if `key` is no hour's. Raises StoreUnavailable."""
    source = source_of(key)
    if source is None:
        return {}
    try:
        functions = msgspec.json.decode(data, type=UsageRecord).functions
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"the record {key} can't be read: {error}") from None
    return {
        Cell(*source, function, version): counts
        for function, versions in functions.items()
        for version, counts in versions.items()
    }


def decode_merged(key: str, data: bytes, low: str = "", high: str = "~") -> tuple[Cells, bool]:
    """Returns the cells of a merged object, and whether it is sealed. Raises StoreUnavailable.

    Only hours from `low` (inclusive) to `high` (exclusive) are returned.
    """
    try:
        record = msgspec.json.decode(data, type=MergedRecord)
        if record.format != FORMAT:
            raise StoreUnavailable(f"the record {key} has format {record.format}: a newer release wrote it, use that")
        inside = [low <= hour < high for hour in record.hours]
        cells = {
            Cell(record.hours[row.hour], record.sources[row.source], function, version): UsageCounts(
                *msgspec.structs.astuple(row)[2:]
            )
            for function, versions in record.functions.items()
            for version, rows in versions.items()
            for row in rows
            if inside[row.hour]
        }
    except (msgspec.DecodeError, IndexError) as error:
        raise StoreUnavailable(f"the record {key} can't be read: {error}") from None
    return cells, record.sealed


def encode_merged(cells: Cells, *, sealed: bool = False) -> bytes:
    hours = {hour: number for number, hour in enumerate(sorted({cell.hour for cell in cells}))}
    sources = {source: number for number, source in enumerate(sorted({cell.source for cell in cells}))}
    functions: dict[str, dict[str, list[Row]]] = {}
    for cell, counts in cells.items():
        row = Row(hours[cell.hour], sources[cell.source], *msgspec.structs.astuple(counts))
        functions.setdefault(cell.function, {}).setdefault(cell.version, []).append(row)
    return msgspec.json.encode(MergedRecord(FORMAT, sealed, list(hours), list(sources), functions))
