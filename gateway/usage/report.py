"""Usage reports: sums over the registry's objects between two hours, by the requested groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

from adapters.errors import InvalidRequest, NotFound
from adapters.store import MAX_LIST, ObjectStore
from gateway.usage.cells import Cell, Cells, join_into
from gateway.usage.counts import BASE, UsageCounts
from gateway.usage.hours import HOUR, hour_name
from gateway.usage.objects import (
    DAY,
    MONTH,
    days_folder,
    decode_hour,
    decode_merged,
    months_folder,
    pages,
    usage_folder,
)

READERS = 8
MAX_ROWS = 20_000
LAST = "~"
"""Character that sorts after each character of a key."""

Group = Literal["tenant", "function", "version", "hour"]
GROUPS: tuple[Group, ...] = ("tenant", "function", "version", "hour")
Row = tuple[str | int | None, ...]
"""Values of the requested groups, in the order of GROUPS."""


class Sheet:
    """Sums by group. Adding raises InvalidRequest beyond MAX_ROWS rows."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(group for group in GROUPS if group in groups)
        self.rows: dict[Row, UsageCounts] = {}
        self.total = UsageCounts()
        self._columns = [GROUPS.index(group) for group in self.groups]

    def add(self, tenant: str, cell: Cell, counts: UsageCounts) -> None:
        version = None if cell.version == BASE else int(cell.version)
        values = tenant, cell.function, version, cell.hour
        self._add_row(tuple([values[column] for column in self._columns]), counts)

    def include(self, sheet: Sheet) -> None:
        """Adds the sums of a sheet of the same groups."""
        for row, counts in sheet.rows.items():
            self._add_row(row, counts)

    def ordered(self) -> Iterator[tuple[dict[str, str | int | None], UsageCounts]]:
        """Yields each row as (value by group, sums), in ascending order. The base model's version, None, comes
        first."""
        for row in sorted(self.rows, key=lambda row: [(value is not None, value) for value in row]):
            yield dict(zip(self.groups, row, strict=True)), self.rows[row]

    def _add_row(self, row: Row, counts: UsageCounts) -> None:
        if row not in self.rows:
            if len(self.rows) == MAX_ROWS:
                raise InvalidRequest("group_by", f"more than {MAX_ROWS} rows: ask for fewer groups or a shorter time")
            self.rows[row] = UsageCounts()
        self.rows[row].add(counts)
        self.total.add(counts)


def sum_usage(
    store: ObjectStore, tenant: str, first: int, end: int, newer: Mapping[str, bytes], groups: Sequence[Group]
) -> Sheet:
    """Returns the sums of the cells of `read_usage`, by group.

    Raises what `read_usage` raises, and InvalidRequest for too many rows.
    """
    sheet = Sheet(groups)
    for cell, counts in read_usage(store, tenant, first, end, newer):
        sheet.add(tenant, cell, counts)
    return sheet


def read_usage(
    store: ObjectStore, tenant: str, first: int, end: int, newer: Mapping[str, bytes]
) -> Iterator[tuple[Cell, UsageCounts]]:
    """Yields each cell once, from the hour of Unix time `first` (inclusive) to `end` (exclusive).

    All hours are read before days are listed, and days before months. So usage that compaction moves meanwhile is read
    again at its new place and merged. `newer`: objects of hours that may be newer than the registry's. Blocks; raises
    StoreUnavailable.
    """
    low, high = hour_name(first), hour_name(end)
    last = hour_name(end - HOUR)
    hours, days, months = usage_folder(tenant), days_folder(tenant), months_folder(tenant)
    cells: Cells = {}
    for key, data in newer.items():
        if hours + low <= key < hours + high:
            join_into(cells, decode_hour(key, data).items())
    for key, data in _contents(store, _keys(store, hours, low, high)):
        join_into(cells, decode_hour(key, data).items())
    for key, data in _contents(store, _keys(store, days, low[:DAY], last[:DAY] + LAST)):
        join_into(cells, decode_merged(key, data, low, high)[0].items())
    by_month: dict[str, list[str]] = {cell.hour[:MONTH]: [] for cell in cells}
    for key in _keys(store, months, low[:MONTH], last[:MONTH] + LAST):
        by_month.setdefault(key.removeprefix(months)[:MONTH], []).append(key)
    for month, keys in sorted(by_month.items()):
        of_month = {cell: counts for cell, counts in cells.items() if cell.hour.startswith(month)}
        for key, data in _contents(store, keys):
            join_into(of_month, decode_merged(key, data, low, high)[0].items())
        yield from of_month.items()


def _keys(store: ObjectStore, folder: str, low: str, high: str) -> Sequence[str]:
    """Returns the folder's keys whose names are between `low` and `high`, both exclusive."""
    return [info.key for page in pages(store.list, folder, low, high, MAX_LIST) for info in page]


def _contents(store: ObjectStore, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yields the key and content of each object that still exists."""
    with ThreadPoolExecutor(READERS, "usage") as pool:
        for key, data in zip(keys, pool.map(partial(_read, store), keys), strict=True):
            if data is not None:
                yield key, data


def _read(store: ObjectStore, key: str) -> bytes | None:
    """Returns an object's content; None if it is gone, because it was merged into one that is read later."""
    try:
        return store.get(key).data
    except NotFound:
        return None
