"""Leases in the object store, for gateways without Redis: objects changed by compare-and-swap.

`gateway.jobs.clocks.ChangeWatch` determines when a lease ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from adapters.errors import Conflict, NotFound, PreconditionFailed, StoreUnavailable
from adapters.store import ObjectStore
from cluster.leases import NOBODY, Lease
from gateway.catalog.threads import LeavableThreads
from gateway.jobs.clocks import ChangeWatch

STORE_LEASE_SECONDS = 60.0
"""Duration of a lease in seconds. It is much longer than in Redis, because a store charges for each write and jobs can
wait."""


class LeaseRecord(msgspec.Struct, frozen=True):
    """Content of leases/<name>.json."""

    holder: str
    seconds: float
    writes: int
    """Number of writes of the record, which makes each ETag unique."""


class StoreLeases:
    """Implementation of `cluster.leases.Leases` whose methods raise StoreUnavailable instead of RedisAway."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._watch = ChangeWatch(clock)
        self._threads = LeavableThreads(1)

    async def take(self, name: str, holder: str, seconds: float) -> Lease:
        record, etag = await self._read(name)
        remaining_s = self._remaining_s(name, record)
        if record.holder not in ("", holder) and remaining_s > 0:
            return Lease(record.holder, remaining_s)
        if await self._write(name, LeaseRecord(holder, seconds, record.writes + 1), etag):
            return Lease(holder, seconds)
        return await self.get(name)

    async def free(self, name: str, holder: str) -> None:
        record, etag = await self._read(name)
        if record.holder == holder:
            await self._write(name, LeaseRecord("", 0.0, record.writes + 1), etag)

    async def get(self, name: str) -> Lease:
        """Returns the lease. When this process reads the object for the first time, the holder that it names may have
        lost the lease long ago."""
        record, _ = await self._read(name)
        remaining_s = self._remaining_s(name, record)
        return Lease(record.holder, remaining_s) if record.holder and remaining_s > 0 else NOBODY

    def _remaining_s(self, name: str, record: LeaseRecord) -> float:
        return record.seconds - self._watch.unchanged_s(name)

    async def _read(self, name: str) -> tuple[LeaseRecord, str | None]:
        """Returns the lease and its ETag, which is None if there is no object yet."""
        try:
            stored = await self._threads.run(partial(self._store.get, _key(name)))
        except NotFound:
            self._watch.forget(name)
            return LeaseRecord("", 0.0, 0), None
        self._watch.observe(name, stored.etag)
        try:
            return msgspec.json.decode(stored.data, type=LeaseRecord), stored.etag
        except msgspec.DecodeError as error:
            raise StoreUnavailable(f"{_key(name)} can't be read as a lease ({error}): remove it") from None

    async def _write(self, name: str, record: LeaseRecord, etag: str | None) -> bool:
        """Writes the lease. Returns False if another process has written it since it was read."""
        data = msgspec.json.encode(record)
        try:
            if etag is None:
                await self._threads.run(partial(self._store.put_if_absent, _key(name), data))
            else:
                await self._threads.run(partial(self._store.put_if_match, _key(name), data, etag))
        except (Conflict, PreconditionFailed):
            return False
        return True


def _key(name: str) -> str:
    return f"leases/{name}.json"
