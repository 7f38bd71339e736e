"""Clocks that do not depend on the clocks of other hosts: the store's time, and the age of a change as this process
observes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from adapters.errors import StoreUnavailable
from adapters.store import ObjectStore
from gateway.catalog.threads import StoreThreads

OFFSET_VALID_S = 600.0


class StoreClock:
    """The store's clock, usually read without a request. All gateways of a registry agree on it.

    `clock`: monotonic seconds.
    """

    def __init__(self, store: ObjectStore, threads: StoreThreads, clock: Callable[[], float]) -> None:
        self._store = store
        self._threads = threads
        self._clock = clock
        self._offset: float | None = None
        self._measured_at = 0.0

    async def now(self) -> float:
        """Returns Unix time by the store's clock. Raises StoreUnavailable if it could never be measured."""
        if self._offset is None or self._clock() - self._measured_at > OFFSET_VALID_S:
            await self.measure()
        assert self._offset is not None
        return self._clock() + self._offset

    async def measure(self) -> None:
        """Reads the store's clock. If that fails, the earlier offset stays. Raises StoreUnavailable without one."""
        self._measured_at = started_at = self._clock()
        try:
            self._offset = await self._threads.read(self._store.now) - started_at
        except StoreUnavailable:
            if self._offset is None:
                raise


class ChangeWatch:
    """Watch of records that serve as leases: a holder renews its lease by rewriting the record, which changes the ETag.

    Clocks of different hosts are never compared. For the holder, a lease begins just before the holder writes the
    record. For a challenger, it begins when the challenger first reads the new ETag, by the challenger's own monotonic
    clock. So the challenger always sees the lease end later than the holder does.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._observed: dict[str, tuple[str, float]] = {}
        """ETag of each record, and the time of the first read that returned it."""

    def observe(self, name: str, etag: str) -> None:
        """Records the ETag that was just read."""
        if name not in self._observed or self._observed[name][0] != etag:
            self._observed[name] = etag, self._clock()

    def unchanged_s(self, name: str) -> float:
        """Returns the seconds since this process first read the record's current ETag. The value is infinite if the
        record was never read."""
        return self._clock() - self._observed[name][1] if name in self._observed else math.inf

    def forget(self, name: str) -> None:
        self._observed.pop(name, None)

    def retain(self, names: Collection[str]) -> None:
        """Forgets all records that are not in `names`."""
        self._observed = {name: self._observed[name] for name in names if name in self._observed}
