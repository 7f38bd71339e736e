"""Compaction of usage: closed hours are merged into their day, and days into their month.

The merged object is written before its sources are removed, and readers count each cell once (`cells.py`). So neither a
crash nor a second compactor changes a sum. An object is never removed if it may contain more than was merged:
- Its gateway may write an hour's object again. It is merged only after QUIET_SECONDS without a write by the store's
  clock, and removed only if it was not written since. A late gateway uses new names (`ledger.py`).
- A day is sealed by compare-and-swap before it is merged. Then nothing is added to it, and its name is never reused.
- A month is never removed.

An object that can't be read is left in place, because reports name it; the others are still merged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from adapters.errors import Conflict, NotFound, PreconditionFailed, StoreUnavailable
from adapters.store import MAX_LIST, ObjectInfo, ObjectStore
from gateway.catalog.threads import LeavableThreads
from gateway.leader.tick import Tick, TickEnded
from gateway.usage.cells import Cells, join_into
from gateway.usage.hours import HOUR, hour_name
from gateway.usage.objects import (
    DAY,
    MONTH,
    day_key,
    days_folder,
    decode_hour,
    decode_merged,
    encode_merged,
    month_key,
    months_folder,
    pages,
    source_of,
    usage_folder,
)

T = TypeVar("T")

CLOSED_SECONDS = 600.0
"""Seconds from the end of an hour until it is closed. By then a gateway with access to the store has written it for the
last time."""
QUIET_SECONDS = 60.0
PAGE = 128
"""Maximum objects that are merged at once, so that this takes a short time even with a slow store."""
MAX_BYTES = 4 << 20
"""Maximum bytes of a merged object that still gets cells. Further cells go into another object of the same day or
month."""
MAX_ATTEMPTS = 10
TENANTS = 100

log = logging.getLogger("gateway")


class UsageCompaction:
    """Leader's job that compacts the usage of all tenants once per hour. `clock`: monotonic seconds."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._threads = LeavableThreads(1)
        self._pending: list[str] = []
        self._last_listed = ""
        self._next_round = 0.0

    async def run(self, tick: Tick) -> None:
        """Runs the round until its end or that of the tick. Raises TickEnded, StoreUnavailable."""
        await self._threads.run(partial(self._work, tick))

    def _work(self, tick: Tick) -> None:
        if self._clock() < self._next_round:
            return
        tick.check()
        now = self._store.now()
        while tenant := self._begin_tenant(tick):
            try:
                compact_tenant(self._store, tenant, now, tick)
            except TickEnded:
                self._pending.insert(0, tenant)
                raise
        self._last_listed = ""
        self._next_round = self._clock() + HOUR - (now - CLOSED_SECONDS) % HOUR

    def _begin_tenant(self, tick: Tick) -> str | None:
        """Returns the round's next tenant; None at its end.

        A tenant whose compaction fails waits for the next round, so the others are not blocked.
        """
        if not self._pending:
            tick.check()
            self._pending = list(self._store.folders("tenants/", self._last_listed, TENANTS))
            if not self._pending:
                return None
            self._last_listed = self._pending[-1]
        return self._pending.pop(0)


def compact_tenant(store: ObjectStore, tenant: str, now: float, tick: Tick) -> None:
    """Merges a tenant's hours and days that are closed at `now` (Unix time by the store's clock).

    `tick.work` counts removed objects. Blocks; raises TickEnded, StoreUnavailable.
    """
    _Compactor(store, tenant, now, tick).run()


class _Compactor:
    def __init__(self, store: ObjectStore, tenant: str, now: float, tick: Tick) -> None:
        self._store = store
        self._tick = tick
        self._hours, self._days, self._months = usage_folder(tenant), days_folder(tenant), months_folder(tenant)
        self._first_open_hour = hour_name(now - CLOSED_SECONDS)
        self._quiet = now - QUIET_SECONDS

    def run(self) -> None:
        for listed in pages(self._list, self._hours, "", self._first_open_hour, PAGE):
            self._merge_hours(listed)
        for listed in pages(self._list, self._days, "", self._first_open_hour[:DAY], PAGE):
            for info in listed:
                self._merge_day(info.key)

    def _merge_hours(self, listed: Sequence[ObjectInfo]) -> None:
        keys = [info.key for info in listed if info.modified < self._quiet and source_of(info.key)]
        with ThreadPoolExecutor(self._store.readers, "compaction") as pool:
            hours = dict(zip(keys, pool.map(self._read_hour, keys), strict=True))
            days: dict[str, Cells] = {}
            for cells in hours.values():
                for cell, counts in (cells or {}).items():
                    join_into(days.setdefault(cell.hour[:DAY], {}), [(cell, counts)])
            for day, cells in days.items():
                self._add(self._days, day, cells)
            merged = [key for key, cells in hours.items() if cells is not None]
            self._tick.work += sum(pool.map(self._remove_hour, merged))

    def _read_hour(self, key: str) -> Cells | None:
        """Returns the cells of an hour's object; None if it is gone or can't be read."""
        self._tick.check()
        try:
            data = self._store.get(key).data
        except NotFound:
            return None
        return _readable(partial(decode_hour, key, data))

    def _remove_hour(self, key: str) -> bool:
        self._tick.check()
        return self._store.delete_older(key, self._quiet)

    def _merge_day(self, key: str) -> None:
        self._tick.check()
        try:
            day = self._store.get(key)
            read = _readable(partial(decode_merged, key, day.data))
            if read is None:
                return
            cells, sealed = read
            if not sealed:
                self._tick.check()
                self._store.put_if_match(key, encode_merged(cells, sealed=True), day.etag)
        except (NotFound, PreconditionFailed):
            return  # another compactor was faster; the next round completes what it leaves
        self._add(self._months, key.removeprefix(self._days)[:MONTH], cells)
        self._tick.check()
        self._store.delete(key)
        self._tick.work += 1

    def _add(self, folder: str, name: str, cells: Cells) -> None:
        """Adds the cells to an object of this day or month. Raises StoreUnavailable after MAX_ATTEMPTS conflicts."""
        for _ in range(MAX_ATTEMPTS):
            with suppress(Conflict, PreconditionFailed, NotFound):
                return self._add_once(folder, name, cells)
        raise StoreUnavailable(f"{folder}{name} was changed by others {MAX_ATTEMPTS} times in a row; it is tried again")

    def _add_once(self, folder: str, name: str, cells: Cells) -> None:
        """Makes one attempt of `_add`. Raises Conflict, PreconditionFailed or NotFound if another compactor was
        faster."""
        listed = self._list(f"{folder}{name}-", "", MAX_LIST)
        for info in listed:
            if info.size >= MAX_BYTES:
                continue
            self._tick.check()
            stored = self._store.get(info.key)
            read = _readable(partial(decode_merged, info.key, stored.data))
            if read is None or read[1]:
                continue
            joined, _ = read
            if join_into(joined, cells.items()):
                self._tick.check()
                self._store.put_if_match(info.key, encode_merged(joined), stored.etag)
            return
        self._tick.check()
        key = day_key(folder, name) if folder == self._days else month_key(folder, name, len(listed))
        self._store.put_if_absent(key, encode_merged(cells))

    def _list(self, prefix: str, after: str, limit: int) -> Sequence[ObjectInfo]:
        self._tick.check()
        return self._store.list(prefix, after, limit)


def _readable(decode: Callable[[], T]) -> T | None:
    """Returns the result of `decode`; None if the object is damaged or of a newer release, which is logged."""
    try:
        return decode()
    except StoreUnavailable as error:
        log.error("usage objects can't be merged", extra={"why": str(error)})
        return None
