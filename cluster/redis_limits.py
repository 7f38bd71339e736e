"""Limits that all gateway workers share in Redis: a script decides on a request, another on a call, by Redis's clock.

The places of each worker are counted separately. The places of a worker that died are thus free again once it has been
silent for WORKER_SECONDS. Full buckets are not stored. While Redis is away each worker allows its share of every limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from cluster.limits import Call, Charge, MemoryLimits, Overspent, Refusal
from cluster.redis_link import WORKER_SECONDS, RedisAway, RedisLink, Value

PLACES_SECONDS = 120
"""Seconds after which Redis removes an owner's counts of places. Workers renew those of the owners that they serve, so
the counts of dead workers go."""
RENEW_SECONDS = 30.0
"""Seconds between two renewals by a worker."""
OWNERS_TOGETHER = 500
"""Number of owners whose places one run of the script recounts."""


class Gate:
    """Gate that many tasks pass at once, and that one task can close for a while. Passing and closing must end in
    bounded time, because others wait."""

    def __init__(self) -> None:
        self._passing = 0
        self._empty, self._open = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._open.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Passes the gate while the context lasts, after waiting until it is open."""
        while not self._open.is_set():
            await self._open.wait()
        self._passing += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._passing -= 1
            if not self._passing:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Closes the gate: no task passes while the context lasts. One task may close it at a time."""
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()


class RedisLimits:
    """Limits in Redis. While Redis is away each limit is divided by the number of workers that were alive when it went
    away, or by `workers` if that is greater. `workers` is the number of workers of this gateway."""

    def __init__(self, link: RedisLink, workers: int) -> None:
        self._link = link
        self._here = MemoryLimits(link.clock, lambda: 1 / max(workers, link.workers))
        self._alone: dict[Call, int] = {}
        """Number of calls in progress that this worker allowed by itself. None of their tokens were taken in Redis."""
        self._unreported: set[str] = set()
        """Owners for which Redis may have another count of places than this worker."""
        self._gate = Gate()
        self._renewed_at = link.clock()
        self._renewing: asyncio.Task[None] | None = None
        link.on_resume.append(self._recount)
        link.on_heartbeat.append(self._renew_if_due)

    async def spend(self, tenant: str, charges: Sequence[Charge]) -> Overspent | None:
        if not charges:
            return None
        keys = [self._link.key("spent", f"{tenant}/{charge.limit}") for charge in charges]
        args: list[Value] = [value for charge in charges for value in (charge.rate, charge.amount)]
        try:
            which, wait = await self._link.run("spend", keys, args)
        except RedisAway:
            return await self._here.spend(tenant, charges)
        return None if which == 0 else Overspent(charges[which - 1], wait / 1000)

    async def take(self, call: Call) -> Refusal | None:
        if not call.limited:
            return None
        async with self._gate.passing():
            try:
                why, wait = await self._take(call)
            except RedisAway:
                self._unreported.update(owner.name for owner in call.owners)  # Redis may have counted the call
                return await self._take_alone(call)
            if why == 0:
                self._here.count(call.owners, call.places)
                return None
        return Refusal("tokens", seconds=wait / 1000) if why == 1 else Refusal("places", call.owners[why - 2])

    async def _take_alone(self, call: Call) -> Refusal | None:
        refusal = await self._here.take(call)
        if refusal is None:
            self._alone[call] = self._alone.get(call, 0) + 1
        return refusal

    async def settle(self, call: Call, unused_tokens: int) -> None:
        if not call.limited:
            return
        async with self._gate.passing():
            alone = self._was_alone(call)
            await self._here.settle(call, unused_tokens if alone else 0)
            tpm = call.tokens_per_minute
            unused: Value = 0 if alone else unused_tokens
            args: list[Value] = [self._link.worker, call.places, unused, "" if tpm is None else tpm]
            try:
                await self._link.run("settle", [self._rates_key(call), *self._places_keys(call)], args)
            except RedisAway:  # places are recounted when it is back, and buckets refill
                self._unreported.update(owner.name for owner in call.owners)

    def _was_alone(self, call: Call) -> bool:
        remaining = self._alone.pop(call, 0) - 1
        if remaining > 0:
            self._alone[call] = remaining
        return remaining >= 0

    async def _take(self, call: Call) -> tuple[int, int]:
        limits = [call.tokens_per_minute, *(owner.limit for owner in call.owners)]
        tpm, *places = ["" if value is None else value for value in limits]
        seconds: list[Value] = [round(WORKER_SECONDS * 1000), PLACES_SECONDS * 1000]
        reserved = [len(call.owners), call.reserved, *places, *(owner.limit or 0 for owner in call.other_functions)]
        args = [self._link.worker, call.places, tpm, call.tokens, *seconds, *reserved]
        other_keys = [self._link.key("places", owner.name) for owner in call.other_functions]
        keys = [self._rates_key(call), self._link.key("workers"), *self._places_keys(call), *other_keys]
        why, wait = await self._link.run("take", keys, args)
        return why, wait

    def _rates_key(self, call: Call) -> str:
        return self._link.key("rates", call.tenant)

    def _places_keys(self, call: Call) -> list[str]:
        return [self._link.key("places", owner.name) for owner in call.owners]

    async def _recount(self) -> None:
        """Reports to Redis the places that were taken or freed while Redis was away, or that Redis has lost. No call is
        counted meanwhile, because that call would be counted twice, or not at all."""
        async with self._gate.closed():
            names = sorted({*self._here.places_in_use, *self._unreported})
            for first in range(0, len(names), OWNERS_TOGETHER):
                await self._report_places(names[first : first + OWNERS_TOGETHER])
            self._unreported.clear()

    def _renew_if_due(self, _version: int) -> None:
        is_renewing = self._renewing is not None and not self._renewing.done()
        if not is_renewing and self._link.clock() - self._renewed_at >= RENEW_SECONDS:
            self._renewed_at = self._link.clock()
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Keeps the counts of the owners whose places this worker has taken, for calls that last long."""
        names = sorted(self._here.places_in_use)
        with suppress(RedisAway):  # then all of them are reported once it is back
            for first in range(0, len(names), OWNERS_TOGETHER):
                keys = [self._link.key("places", name) for name in names[first : first + OWNERS_TOGETHER]]
                await self._link.run("renew", keys, [PLACES_SECONDS * 1000])

    async def _report_places(self, names: list[str]) -> None:
        counts = [self._here.places_in_use.get(name, 0) for name in names]
        args: list[Value] = [self._link.worker, PLACES_SECONDS * 1000, *counts]
        await self._link.catch_up_run("recount", [self._link.key("places", name) for name in names], args)
