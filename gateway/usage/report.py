"""Usage summed up: the objects of the registry between two hours, grouped as asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import msgspec

from adapters.errors import InvalidRequest, NotFound, StoreUnavailable
from adapters.store import MAX_LIST, ObjectStore
from gateway.usage.counts import BASE, UsageCounts, UsageRecord, usage_folder
from gateway.usage.hours import hour_name

READERS = 8
MAX_ROWS = 20_000

Group = Literal["tenant", "function", "version", "hour"]
GROUPS: tuple[Group, ...] = ("tenant", "function", "version", "hour")
Row = tuple[str | int | None, ...]
"""Values of the groups that were asked for, in the order of GROUPS."""


class Sheet:
    """Sums by group. Raises InvalidRequest for more than MAX_ROWS rows."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(group for group in GROUPS if group in groups)
        self.rows: dict[Row, UsageCounts] = {}
        self.total = UsageCounts()

    def add(self, tenant: str, hour: str, record: UsageRecord) -> None:
        for function, versions in record.functions.items():
            for version, counts in versions.items():
                values: dict[Group, str | int | None] = {
                    "tenant": tenant,
                    "function": function,
                    "version": None if version == BASE else int(version),
                    "hour": hour,
                }
                self.rows.setdefault(tuple(values[group] for group in self.groups), UsageCounts()).add(counts)
                self.total.add(counts)
        if len(self.rows) > MAX_ROWS:
            raise InvalidRequest("group_by", f"more than {MAX_ROWS} rows: ask for fewer groups or a shorter time")

    def ordered(self) -> Iterator[tuple[dict[str, str | int | None], UsageCounts]]:
        """(group -> value, sums), ascending; the base model's version, None, comes first."""
        for row in sorted(self.rows, key=lambda row: [(value is not None, value) for value in row]):
            yield dict(zip(self.groups, row, strict=True)), self.rows[row]


def read_usage(
    store: ObjectStore, tenant: str, first: int, end: int, newer: Mapping[str, bytes]
) -> list[tuple[str, UsageRecord]]:
    """(hour, record) of all gateways from the hour of Unix time `first` until before `end`.

    `newer`: objects that are to be taken in place of the registry's. Blocks; raises StoreUnavailable.
    """
    folder = usage_folder(tenant)
    low, high = folder + hour_name(first), folder + hour_name(end)
    keys = {key for key in newer if low <= key < high}
    after = low
    while listed := store.list(folder, after, MAX_LIST):
        keys |= {info.key for info in listed if info.key < high}
        after = listed[-1].key
        if after >= high or len(listed) < MAX_LIST:
            break
    with ThreadPoolExecutor(READERS, "usage") as pool:
        contents = list(pool.map(lambda key: newer.get(key) or _read(store, key), sorted(keys)))
    return [
        (key.removeprefix(folder).partition("/")[0], _decode(key, data))
        for key, data in zip(sorted(keys), contents, strict=True)
    ]


def _read(store: ObjectStore, key: str) -> bytes:
    try:
        return store.get(key).data
    except NotFound:
        raise StoreUnavailable(f"{key} was removed while it was read") from None


def _decode(key: str, data: bytes) -> UsageRecord:
    try:
        return msgspec.json.decode(data, type=UsageRecord)
    except msgspec.DecodeError as error:
        raise StoreUnavailable(f"the record {key} can't be read: {error}") from None
