"""Sums over all gateway workers: functions in the last hour, SLO attainment, and the pools' loads.

Redis stores them by time slice, and they expire with their window. Each worker adds its counts once a second, and the
worker that answers reads them. Slices follow Redis's clock, because the hosts' clocks may differ; a worker reports how
long ago it counted. Counts that can't be reported wait for Redis as long as their window lasts. If Redis has lost its
data, workers report theirs again. Without Redis the answer is this worker's own counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec

from cluster.redis_link import RedisAway, RedisLink, Value
from gateway.background import background
from gateway.workers.attainment import Attainment, PromiseCounts
from gateway.workers.last_hour import Counts, LastHour, name_of
from gateway.workers.pool_loads import PoolLoad, PoolLoads, add_up
from gateway.workers.sliding_sums import SlidingSums, Sum

FLUSH_SECONDS = 1.0
READ_SECONDS = 2.0
"""Maximum seconds to wait for the sums of all workers."""
LOAD_SECONDS = 5.0
"""Seconds for which a worker's report of the pools' loads is valid."""
SUMS_TOGETHER = 500
SLICES_TOGETHER = 30
"""Maximum slices that one Redis script handles. A longer script would delay the reservation of places."""

AWAY = (RedisAway, TimeoutError)


class Windows:
    """Sums over all workers, as one worker reports and reads them. Without a link to Redis there are no other
    workers."""

    def __init__(self, link: RedisLink | None, hour: LastHour, attainment: Attainment, loads: PoolLoads) -> None:
        self._link, self._hour, self._attainment, self._loads = link, hour, attainment, loads
        self._flushing = asyncio.Lock()
        self._number = 1
        self._batch: list[tuple[SlidingSums[Any], list[tuple[str, int, Any]]]] = []
        """Batch of counts to report. It is sent under `_number` until Redis answers, and Redis counts each number
        once."""
        self._all = True
        """True if the next batch begins a complete report, which contains all current counts."""
        self._report_all()

    async def last_hour(self, tenant: str, function: str) -> Counts:
        return (await self._of(self._hour, name_of(tenant, function)))[0]

    async def attainment(self, tenant: str) -> list[PromiseCounts]:
        """Returns the tenant's SLO attainment for each of gateway.workers.attainment.WINDOWS_S."""
        return await self._of(self._attainment, tenant)

    async def attained(self) -> dict[str, list[PromiseCounts]]:
        """Returns the SLO attainment in each window, by tenant."""
        sums = await self._read(self._attainment, "")
        return self._attainment.all() if sums is None else sums

    async def loads(self) -> tuple[dict[str | None, PoolLoad], int]:
        """Returns the loads by pool, and the number of workers whose loads are included.

        While Redis is unavailable only this worker's loads are included.
        """
        reported: list[bytes] = []
        if self._link is not None:
            args = [self._link.key("load", ""), self._link.worker]
            with suppress(RedisAway):
                reported = await self._link.run("loads", [self._link.key("workers")], args)
        reports = [msgspec.msgpack.decode(each, type=list[PoolLoad]) for each in reported]
        return add_up([*self._loads.here(), *(load for loads in reports for load in loads)]), 1 + len(reports)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reports counts to Redis as long as the context lasts, and once at its end. Does nothing without a link."""
        if self._link is None:
            yield
            return
        try:
            async with background(partial(self._tick, self._link)):
                yield
        finally:
            with suppress(*AWAY):
                async with asyncio.timeout(READ_SECONDS):
                    await self._flush(self._link)

    async def _tick(self, link: RedisLink) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            with suppress(RedisAway):
                await self._flush(link)

    async def _of(self, sums: SlidingSums[Sum], name: str) -> list[Sum]:
        by_name = await self._read(sums, name)
        return sums.of(name) if by_name is None else by_name.get(name) or [sums.empty() for _ in sums.windows]

    async def _read(self, sums: SlidingSums[Sum], name: str) -> dict[str, list[Sum]] | None:
        """Returns the sums of all workers by name (empty `name`: all names).

        Returns None without a link, and if Redis is unavailable or does not answer within READ_SECONDS.
        """
        if self._link is None:
            return None
        with suppress(*AWAY):
            async with asyncio.timeout(READ_SECONDS):
                await self._flush(self._link)
                return await _sums(self._link, sums, name)
        return None

    async def _flush(self, link: RedisLink) -> None:
        """Reports all pending counts and the current loads to Redis. Raises RedisAway."""
        keys = [link.key("told", link.worker), link.key("load", link.worker)]
        kinds = (self._hour, self._attainment)
        async with self._flushing:
            more = True
            while more:
                again = bool(self._batch)
                self._batch = self._batch or [(sums, sums.take_unreported(SUMS_TOGETHER)) for sums in kinds]
                load = msgspec.msgpack.encode(self._loads.here())
                expiry = round(LOAD_SECONDS * 1000)
                args: list[Value] = [self._number, int(self._all), expiry, load, _encoded(link, self._batch)]
                is_counted = await link.run("count", keys, args) >= 0
                more = again or not is_counted or any(len(counted) == SUMS_TOGETHER for _, counted in self._batch)
                self._batch, self._number, self._all = [], self._number + 1, not is_counted
                if not is_counted:
                    self._report_all()

    def _report_all(self) -> None:
        if self._link is not None:
            self._hour.report_all()
            self._attainment.report_all()


def _encoded(link: RedisLink, batch: list[tuple[SlidingSums[Any], list[tuple[str, int, Any]]]]) -> bytes:
    kinds = []
    for sums, unreported in batch:
        counted = [(name, sums.age(at), msgspec.structs.astuple(counts)) for name, at, counts in unreported]
        kinds.append((link.key("sums", sums.kind, ""), sums.seconds, sums.windows[-1], sums.max_names, counted))
    return msgspec.json.encode(kinds)


async def _sums(link: RedisLink, sums: SlidingSums[Sum], name: str) -> dict[str, list[Sum]]:
    """Returns the sums of all workers by name, one per window. Raises RedisAway."""
    by_name: dict[str, list[Sum]] = {}
    newest: Value = ""
    for first, end in pairwise(sorted({*sums.windows, *range(0, sums.windows[-1], SLICES_TOGETHER)})):
        args: list[Value] = [sums.seconds, name, newest, first, end - 1]
        newest, part = await link.run("sums", [link.key("sums", sums.kind, "")], args)
        for each, numbers in msgspec.json.decode(part).items():
            totals = by_name.setdefault(each, [sums.empty() for _ in sums.windows])
            for window, total in zip(sums.windows, totals, strict=True):
                if end <= window:
                    total.add(sums.empty(*numbers))
    return by_name
