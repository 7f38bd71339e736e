"""Limits that all gateway workers keep together, in Redis: one script decides, by Redis's clock.

Every worker's places are counted by themselves, so that those of a worker that died are free again once it has been
silent for WORKER_SECONDS. Buckets that are full are not kept. While Redis is away each worker gives away its share.
"""

from __future__ import annotations

from cluster.limits import Call, MemoryLimits, Refusal
from cluster.redis_link import WORKER_SECONDS, RedisAway, RedisLink, Value

PLACES_SECONDS = 7200
"""Longer than a call may last: how long places are kept that nobody takes or gives back."""


class RedisLimits:
    """`workers`: how many share the limits while Redis is away."""

    def __init__(self, link: RedisLink, workers: int) -> None:
        self._link = link
        self._here = MemoryLimits(link.clock, 1 / workers)
        self._untold: set[str] = set()
        """Owners whose places were given back, which Redis could not be told."""
        link.on_resume.append(self._recount)

    async def take(self, call: Call) -> Refusal | None:
        if not call.limited:
            return None
        try:
            why, wait = await self._take(call)
        except RedisAway:
            return self._here.take_now(call)
        match why:
            case 0:
                self._here.count(call.owners, call.places)
                return None
            case 1:
                return Refusal("requests", seconds=wait / 1000)
            case 2:
                return Refusal("tokens", seconds=wait / 1000)
        return Refusal("places", call.owners[why - 3])

    async def settle(self, call: Call, unused_tokens: int) -> None:
        if not call.limited:
            return
        self._here.settle_now(call, unused_tokens)
        tpm = call.rates.tokens_per_minute
        args: list[Value] = [self._link.worker, call.places, unused_tokens, "" if tpm is None else tpm]
        try:
            await self._link.run("settle", [self._rates_key(call), *self._places_keys(call)], args)
        except RedisAway:  # places are counted anew when it is back, and buckets fill by themselves
            self._untold.update(owner.name for owner in call.owners)

    async def _take(self, call: Call) -> tuple[int, int]:
        rates = [call.rates.rps, call.rates.tokens_per_minute]
        limits = [owner.limit for owner in call.owners]
        rps, tpm, *places = ["" if value is None else value for value in (*rates, *limits)]
        seconds: list[Value] = [round(WORKER_SECONDS * 1000), PLACES_SECONDS * 1000]
        args = [self._link.worker, call.places, rps, tpm, call.tokens, *seconds, *places]
        keys = [self._rates_key(call), self._link.key("workers"), *self._places_keys(call)]
        why, wait = await self._link.run("take", keys, args)
        return why, wait

    def _rates_key(self, call: Call) -> str:
        return self._link.key("rates", call.tenant)

    def _places_keys(self, call: Call) -> list[str]:
        return [self._link.key("places", owner.name) for owner in call.owners]

    async def _recount(self) -> None:
        """Places that were taken or given back while Redis could not be told, or that it has lost."""
        if self._link.is_up:
            return  # nothing was missed, and calls that are being counted right now would be counted twice
        for name in {*self._here.taken, *self._untold}:
            args: list[Value] = [self._link.worker, self._here.taken.get(name, 0), PLACES_SECONDS * 1000]
            await self._link.catch_up_run("recount", [self._link.key("places", name)], args)
        self._untold.clear()
