"""The objects of the registry that hold usage, and their names.

tenants/<tenant>/usage/<hour>/<gateway>-<part>.json             what one journal counted, written by its gateway alone
tenants/<tenant>/usage/<hour>/<gateway>-<part>-<changes>.json   the same, newer, from a gateway that was late
tenants/<tenant>/usage/days/<day>-<id>.json                     hours that are over, merged
tenants/<tenant>/usage/months/<month>-<number>.json             days that are over, merged
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
"""Format of merged objects; a later one is refused."""
DAY = len("2026-11-21")
MONTH = len("2026-11")
"""An hour's name begins with its day's, and that with its month's."""


class UsageRecord(msgspec.Struct, frozen=True):
    """An hour of one journal."""

    functions: Functions


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A cell: indices into the object's `hours` and `sources`, then the counters."""

    hour: int
    source: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cold_starts: int
    device_seconds: float = 0.0
    device_gb_seconds: float = 0.0
    host_gb_seconds: float = 0.0
    device_pinned_gb_seconds: float = 0.0
    host_pinned_gb_seconds: float = 0.0


class MergedRecord(msgspec.Struct, frozen=True):
    """Many hours of many journals."""

    format: int
    sealed: bool
    """Nobody adds to it any more: it is about to be merged into the next level and removed."""
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
    """A key that was never used: a removal that is late can't meet a newer object of the same name."""
    return f"{folder}{day}-{secrets.token_hex(8)}.json"


def month_key(folder: str, month: str, number: int) -> str:
    """Returns the key of the month's next object. Two compactors that both begin one compute the same key, so that one
    of them is refused. None is ever removed, so no number comes twice."""
    return f"{folder}{month}-{number:04d}.json"


def usage_key(tenant: str, hour: str, gateway: str, part: int, late: int | None = None) -> str:
    """`late`: the number of changes in what is written, so that a late object is written once under its name."""
    suffix = "" if late is None else f"-{late}"
    return f"{usage_folder(tenant)}{hour}/{gateway}-{part}{suffix}.json"


def source_of(key: str) -> tuple[str, str] | None:
    """(hour, source) that a key names; None if it is no object of an hour."""
    *_, hour, name = key.split("/")
    try:
        hour_start(hour)
    except ValueError:
        return None
    return hour, "-".join(name.removesuffix(".json").split("-")[:2])


def pages(
    list_objects: Callable[[str, str, int], Sequence[ObjectInfo]], folder: str, low: str, high: str, size: int
) -> Iterator[list[ObjectInfo]]:
    """Yields the folder's objects whose names are greater than `low` and less than `high`, up to `size` at a time, as
    `list_objects` (ObjectStore.list) lists them."""
    after, more = folder + low, True
    while more:
        listed = list_objects(folder, after, size)
        below = [info for info in listed if info.key < folder + high]
        yield below
        more = len(below) == size
        after = listed[-1].key if listed else after


def decode_hour(key: str, data: bytes) -> Cells:
    """Cells of an object of an hour; none if the key names no such object. Raises StoreUnavailable."""
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
    """(cells of the hours from `low` until before `high`, whether the object is sealed). Raises StoreUnavailable."""
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
