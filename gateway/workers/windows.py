"""What functions did in the last hour, what was kept of promises, and the pools' loads: of all gateway workers.

They are sums in Redis, by slices of time, that expire with their window. A worker adds to them once a second what it
has counted, and whoever asks reads them. Slices are by Redis's clock, which all workers share (those of their hosts
may differ): a worker says how long ago it counted. What can't be told waits until Redis is back, within its window;
what Redis has lost a worker tells again. Meanwhile, and without Redis, the answer is what this worker has counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import msgspec

from cluster.redis_link import RedisAway, RedisLink, Value
from gateway.workers.attainment import Attainment, Kept
from gateway.workers.last_hour import Counts, LastHour, name_of
from gateway.workers.pool_loads import PoolLoad, PoolLoads, add_up
from gateway.workers.sliding_sums import SlidingSums, Sum

FLUSH_SECONDS = 1.0
READ_SECONDS = 2.0
"""Longest wait for the sums of all workers."""
LOAD_SECONDS = 5.0
"""What a worker sees of the pools' loads is believed for so long."""
SUMS_TOGETHER = 500
SLICES_TOGETHER = 30
"""Scripts that add or read more would hold up whoever reserves a place."""

AWAY = (RedisAway, TimeoutError)

log = logging.getLogger("gateway")


class Windows:
    """Of one worker. Without a link there are no others."""

    def __init__(self, link: RedisLink | None, hour: LastHour, attainment: Attainment, loads: PoolLoads) -> None:
        self._link, self._hour, self._attainment, self._loads = link, hour, attainment, loads
        self._flushing = asyncio.Lock()
        self._number = 1
        self._batch: list[tuple[SlidingSums[Any], list[tuple[str, int, Any]]]] = []
        """Goes out under its number until there is an answer: Redis counts no number twice."""
        self._all = True
        """The next batch is the first of all that is within the windows."""
        self._tell_all()

    async def last_hour(self, tenant: str, function: str) -> Counts:
        return (await self._of(self._hour, name_of(tenant, function)))[0]

    async def attainment(self, tenant: str) -> list[Kept]:
        """For each of gateway.attainment.WINDOWS."""
        return await self._of(self._attainment, tenant)

    async def attained(self) -> dict[str, list[Kept]]:
        """By tenant."""
        found = await self._read(self._attainment, "")
        return self._attainment.all() if found is None else found

    async def loads(self) -> tuple[dict[str | None, PoolLoad], int]:
        """By pool; and of how many workers, this one included."""
        told: list[bytes] = []
        if self._link is not None:
            args = [self._link.key("load", ""), self._link.worker]
            with suppress(RedisAway):
                told = await self._link.run("loads", [self._link.key("workers")], args)
        others = [msgspec.msgpack.decode(each, type=list[PoolLoad]) for each in told]
        return add_up([*self._loads.here(), *(load for loads in others for load in loads)]), 1 + len(others)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What is counted is told as long as the context lasts, and at its end."""
        if self._link is None:
            yield
            return
        task = asyncio.create_task(self._tick(self._link))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with suppress(*AWAY):
                async with asyncio.timeout(READ_SECONDS):
                    await self._flush(self._link)

    async def _tick(self, link: RedisLink) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self._flush(link)
            except RedisAway:
                continue
            except Exception:  # whatever it was, this worker's pools and counts must not fall silent
                log.exception("what was counted could not be told")

    async def _of(self, sums: SlidingSums[Sum], name: str) -> list[Sum]:
        found = await self._read(sums, name)
        return sums.of(name) if found is None else found.get(name) or [sums.empty() for _ in sums.windows]

    async def _read(self, sums: SlidingSums[Sum], name: str) -> dict[str, list[Sum]] | None:
        """By name (empty: all names); None while Redis is away."""
        if self._link is None:
            return None
        with suppress(*AWAY):
            async with asyncio.timeout(READ_SECONDS):
                await self._flush(self._link)
                return await _sums(self._link, sums, name)
        return None

    async def _flush(self, link: RedisLink) -> None:
        """Raises RedisAway."""
        keys = [link.key("told", link.worker), link.key("load", link.worker)]
        kinds = (self._hour, self._attainment)
        async with self._flushing:
            more = True
            while more:
                again = bool(self._batch)
                self._batch = self._batch or [(sums, sums.take_untold(SUMS_TOGETHER)) for sums in kinds]
                load = msgspec.msgpack.encode(self._loads.here())
                expiry = round(LOAD_SECONDS * 1000)
                args: list[Value] = [self._number, int(self._all), expiry, load, _told(link, self._batch)]
                known = await link.run("count", keys, args) >= 0
                more = again or not known or any(len(told) == SUMS_TOGETHER for _, told in self._batch)
                self._batch, self._number, self._all = [], self._number + 1, not known
                if not known:
                    self._tell_all()

    def _tell_all(self) -> None:
        if self._link is not None:
            self._hour.tell_all()
            self._attainment.tell_all()


def _told(link: RedisLink, batch: list[tuple[SlidingSums[Any], list[tuple[str, int, Any]]]]) -> bytes:
    kinds = []
    for sums, told in batch:
        counted = [(name, sums.age(at), msgspec.structs.astuple(counts)) for name, at, counts in told]
        kinds.append((link.key("sums", sums.kind, ""), sums.seconds, sums.windows[-1], sums.most, counted))
    return msgspec.json.encode(kinds)


async def _sums(link: RedisLink, sums: SlidingSums[Sum], name: str) -> dict[str, list[Sum]]:
    """Raises RedisAway."""
    found: dict[str, list[Sum]] = {}
    newest: Value = ""
    for first, end in pairwise(sorted({*sums.windows, *range(0, sums.windows[-1], SLICES_TOGETHER)})):
        args: list[Value] = [sums.seconds, name, newest, first, end - 1]
        newest, part = await link.run("sums", [link.key("sums", sums.kind, "")], args)
        for each, numbers in msgspec.json.decode(part).items():
            totals = found.setdefault(each, [sums.empty() for _ in sums.windows])
            for window, total in zip(sums.windows, totals, strict=True):
                if end <= window:
                    total.add(sums.empty(*numbers))
    return found
