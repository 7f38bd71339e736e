"""Limits of a tenant: requests per second, tokens per minute, and places (generations under way at once).

The rates are token buckets. That of the requests holds one second's worth, one request at least; that of the tokens one
minute's. A call takes one request, and the tokens that it may use at most; what it did not use is given back at its
end. A call of more tokens than the bucket holds needs a full one, and leaves it below empty.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

IDLE_BUCKETS = 1000
"""Number of buckets from which on full ones are forgotten."""
LONGEST_WAIT = 1e9
"""Seconds: of rates that allow next to nothing."""


class Rates(msgspec.Struct, frozen=True):
    """Rate limits of a tenant. None: not limited."""

    rps: float | None = None
    tokens_per_minute: float | None = None


class Owner(msgspec.Struct, frozen=True):
    """An owner of places: a tenant, or one of its functions (`tenant/function`)."""

    name: str
    limit: int | None


class Call(msgspec.Struct, frozen=True):
    """Demand of one call."""

    tenant: str
    rates: Rates
    tokens: int
    """Tokens that it may use, prompt included."""
    places: int
    owners: tuple[Owner, ...] = ()
    """Owners of the places, the tenant first if it has a limit, the function last: it takes as many from each."""
    reserved: int = 0
    """Places that are kept for the function."""
    other_functions: tuple[Owner, ...] = ()
    """The tenant's other functions that have places kept for them, as many as the `limit` of each says: what of these
    is free counts as taken from the tenant's, but for a call that stays within its own function's."""

    @property
    def limited(self) -> bool:
        return self.rates != Rates() or bool(self.owners)


class Refusal(msgspec.Struct, frozen=True):
    why: Literal["requests", "tokens", "places"]
    owner: Owner | None = None
    """Owner whose places are in use."""
    seconds: float | None = None
    """Time until it would be allowed, if nothing else came; None: unknown."""


class LimitState(Protocol):
    """Takes calls within their limits. Shared by all gateway workers, so that a limit means the whole gateway."""

    async def take(self, call: Call) -> Refusal | None:
        """Takes all that the call asks for, and returns None; or takes nothing, and returns why. One round trip at
        most, none without a limit."""
        ...

    async def settle(self, call: Call, unused_tokens: int) -> None:
        """Ends the call which `take` allowed: gives back its places and its `unused_tokens`."""
        ...


class Bucket:
    """A token bucket, full at first: it fills by `rate` a second up to `capacity`. `now` is in seconds."""

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self.rate, self.capacity = rate, capacity
        self.level, self._at = capacity, now

    def adjust(self, rate: float, capacity: float, now: float) -> None:
        """Lets time pass until `now`, then continues with this rate and capacity."""
        self.level = min(self.capacity, self.level + max(0.0, now - self._at) * self.rate)
        self.rate, self.capacity, self._at = rate, capacity, max(now, self._at)
        self.level = min(capacity, self.level)

    def wait(self, needed: float) -> float:
        """Returns the seconds until it holds `needed`; 0 when it does."""
        missing = max(0.0, min(needed, self.capacity) - self.level)
        if not missing:
            return 0.0
        return min(LONGEST_WAIT, missing / self.rate if self.rate > 0 else math.inf)

    def change(self, by: float) -> None:
        self.level = min(self.capacity, self.level + by)

    def take(self, amount: float, now: float) -> bool:
        """Lets time pass, then takes the amount. Returns False, taking nothing, if the bucket holds less."""
        self.adjust(self.rate, self.capacity, now)
        if self.wait(amount) > 0:
            return False
        self.change(-amount)
        return True

    def is_full(self, now: float) -> bool:
        return self.level + (now - self._at) * self.rate >= self.capacity


class MemoryLimits:
    """Limits of one process, where nothing is waited for: a call is taken or settled in one step. `share`: the part of
    each limit that this process may give away, a place at least."""

    def __init__(self, clock: Callable[[], float], share: Callable[[], float] = lambda: 1.0) -> None:
        self._clock = clock
        self._share = share
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()
        self.places_in_use: dict[str, int] = {}
        """Places by owner."""

    async def take(self, call: Call) -> Refusal | None:
        share = self._share()
        for owner in call.owners:
            allowed = math.inf if owner.limit is None else max(1, math.floor(owner.limit * share))
            if (
                self.places_in_use.get(owner.name, 0) + self._reserved_for_others(call, owner, share) + call.places
                > allowed
            ):
                return Refusal("places", owner)
        requests, tokens = self._rates(call)
        if requests is not None and (seconds := requests.wait(1)) > 0:
            return Refusal("requests", seconds=seconds)
        if tokens is not None and (seconds := tokens.wait(call.tokens)) > 0:
            return Refusal("tokens", seconds=seconds)
        if requests is not None:
            requests.change(-1)
        if tokens is not None:
            tokens.change(-call.tokens)
        self.count(call.owners, call.places)
        return None

    def _reserved_for_others(self, call: Call, owner: Owner, share: float) -> int:
        """Returns how many places of an owner are kept for other functions than the call's."""
        function = call.owners[-1].name
        within = self.places_in_use.get(function, 0) + call.places <= math.floor(call.reserved * share)
        if owner.name != call.tenant or within:
            return 0
        free = (
            math.floor((each.limit or 0) * share) - self.places_in_use.get(each.name, 0)
            for each in call.other_functions
        )
        return sum(max(0, places) for places in free)

    async def settle(self, call: Call, unused_tokens: int) -> None:
        self.count(call.owners, -call.places)
        bucket = self._buckets.get((call.tenant, "tokens"))
        if bucket is not None and call.rates.tokens_per_minute is not None:
            bucket.change(unused_tokens)

    def count(self, owners: Sequence[Owner], by: int) -> None:
        for owner in owners:
            in_use = self.places_in_use.get(owner.name, 0) + by
            if in_use > 0:
                self.places_in_use[owner.name] = in_use
            else:
                self.places_in_use.pop(owner.name, None)

    def _rates(self, call: Call) -> tuple[Bucket | None, Bucket | None]:
        rps, tpm, share = call.rates.rps, call.rates.tokens_per_minute, self._share()
        requests = None if rps is None else self._bucket((call.tenant, "requests"), rps * share, 1.0)
        tokens = None if tpm is None else self._bucket((call.tenant, "tokens"), tpm * share / 60, 60.0)
        return requests, tokens

    def _bucket(self, key: tuple[str, str], rate: float, seconds: float) -> Bucket:
        """Returns the key's bucket as of now, with these settings: its capacity is `seconds` worth of the rate, and at
        least 1. A key without a bucket gets a full one."""
        now, capacity = self._clock(), max(1.0, rate * seconds)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._forget_full(now)
            bucket = self._buckets[key] = Bucket(rate, capacity, now)
        bucket.adjust(rate, capacity, now)
        return bucket

    def _forget_full(self, now: float) -> None:
        """Forgets buckets that are full again: they say nothing. Looks at a few of the oldest, so that this never takes
        long."""
        for key in list(self._buckets)[:2] if len(self._buckets) >= IDLE_BUCKETS else ():
            if self._buckets[key].is_full(now):
                del self._buckets[key]
            else:
                self._buckets.move_to_end(key)
