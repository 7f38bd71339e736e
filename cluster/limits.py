"""Limits of a tenant: rates of its requests, tokens per minute, and places (generations under way at once).

Rates are token buckets. A request takes its charges when it comes, and gets none of them back. The bucket of tokens
holds one minute's worth: a call takes the maximum number of tokens that it may use, and unused ones are returned when
it ends. An amount larger than a bucket needs the full bucket, and leaves it with a negative level.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

RateName = Literal["rps", "text_bytes_per_second", "reads_per_second", "writes_per_second"]
IDLE_BUCKETS = 1000
"""Number of stored buckets above which full ones are removed."""
MAX_WAIT_S = 1e9
"""Upper bound on a reported waiting time, in seconds, for rates near 0."""


class Charge(msgspec.Struct, frozen=True):
    """Amount that a request takes from one bucket of a tenant."""

    limit: RateName
    """Name of the rate in the tenant's `limits`."""
    rate: float
    """Amount per second by which the bucket fills. The bucket holds one second's worth, and at least 1."""
    amount: float = 1.0


class Owner(msgspec.Struct, frozen=True):
    """Owner of places: a tenant, or one of its functions (`tenant/function`)."""

    name: str
    limit: int | None


class Call(msgspec.Struct, frozen=True):
    """Amounts that one call takes of its tenant's limits."""

    tenant: str
    tokens_per_minute: float | None
    """Rate limit of tokens; None: not limited."""
    tokens: int
    """Maximum number of tokens that the call may use, prompt included."""
    places: int
    owners: tuple[Owner, ...] = ()
    """Owners of the call's places: the tenant first (if it has a limit), the function last. The call takes `places`
    from each of them."""
    reserved: int = 0
    """Number of places reserved for the call's function."""
    other_functions: tuple[Owner, ...] = ()
    """The tenant's other functions with reserved places; `limit` is the number reserved. Their unused reserved places
    count as taken from the tenant's limit. A call that stays within its own function's reserved places ignores them."""
    charge: Charge | None = None
    """Charge that the start of the call takes; None if its request has taken it, or calls are not limited."""

    @property
    def limited(self) -> bool:
        """True: the call's tokens are limited, or it takes places."""
        return self.tokens_per_minute is not None or bool(self.owners)


class Refusal(msgspec.Struct, frozen=True):
    """Reason why a call is refused by a limit."""

    why: Literal["tokens", "places"]
    owner: Owner | None = None
    """Owner whose places are all in use."""
    seconds: float | None = None
    """Seconds until the call would be allowed if no other call came; None: unknown."""


class Overspent(msgspec.Struct, frozen=True):
    """Reason why a request is refused by a rate."""

    charge: Charge
    seconds: float
    """Seconds until the request would be allowed if no other one came."""


class LimitState(Protocol):
    """State of the limits, shared by all gateway workers, so that a limit applies to the gateway as a whole."""

    async def spend(self, tenant: str, charges: Sequence[Charge]) -> Overspent | None:
        """Takes all charges of a request and returns None, or takes nothing and returns the first one that the tenant
        can't pay. Makes one round trip at most, and none without charges."""
        ...

    async def take(self, call: Call) -> Refusal | None:
        """Takes all that the call needs and returns None, or takes nothing and returns the refusal. Makes one round
        trip at most, and none for a call without limits."""
        ...

    async def settle(self, call: Call, unused_tokens: int) -> None:
        """Ends a call that `take` allowed: returns its places and its `unused_tokens`."""
        ...


class Bucket:
    """Token bucket that starts full. It fills at `rate` per second up to `capacity`. `now` is in seconds."""

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        self.rate, self.capacity = rate, capacity
        self.level, self._at = capacity, now

    def adjust(self, rate: float, capacity: float, now: float) -> None:
        """Refills the bucket for the time until `now`, then sets the new rate and capacity."""
        self.level = min(self.capacity, self.level + max(0.0, now - self._at) * self.rate)
        self.rate, self.capacity, self._at = rate, capacity, max(now, self._at)
        self.level = min(capacity, self.level)

    def wait(self, needed: float) -> float:
        """Returns the seconds until the bucket holds `needed`, or is full if its capacity is less. Returns 0 when the
        bucket already does or is."""
        missing = max(0.0, min(needed, self.capacity) - self.level)
        if not missing:
            return 0.0
        return min(MAX_WAIT_S, missing / self.rate if self.rate > 0 else math.inf)

    def change(self, by: float) -> None:
        """Adds `by` to the level, up to the capacity. The level may become negative."""
        self.level = min(self.capacity, self.level + by)

    def take(self, amount: float, now: float) -> bool:
        """Refills the bucket for the time until `now`, then takes the amount. Returns False, and takes nothing, if the
        bucket holds less."""
        self.adjust(self.rate, self.capacity, now)
        if self.wait(amount) > 0:
            return False
        self.change(-amount)
        return True

    def is_full(self, now: float) -> bool:
        """Returns whether the bucket is full at `now`."""
        return self.level + (now - self._at) * self.rate >= self.capacity


class MemoryLimits:
    """Limits kept by one process. `take` and `settle` never suspend, so no other task runs in between. `share` returns
    the fraction of each limit that this process may use; at least one place is allowed."""

    def __init__(self, clock: Callable[[], float], share: Callable[[], float] = lambda: 1.0) -> None:
        self._clock = clock
        self._share = share
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()
        self.places_in_use: dict[str, int] = {}
        """Number of places in use, by owner."""

    async def spend(self, tenant: str, charges: Sequence[Charge]) -> Overspent | None:
        share = self._share()
        buckets = [self._bucket((tenant, charge.limit), charge.rate * share, 1.0) for charge in charges]
        for charge, bucket in zip(charges, buckets, strict=True):
            if (seconds := bucket.wait(charge.amount)) > 0:
                return Overspent(charge, seconds)
        for charge, bucket in zip(charges, buckets, strict=True):
            bucket.change(-charge.amount)
        return None

    async def take(self, call: Call) -> Refusal | None:
        share = self._share()
        for owner in call.owners:
            allowed = math.inf if owner.limit is None else max(1, math.floor(owner.limit * share))
            if (
                self.places_in_use.get(owner.name, 0) + self._reserved_for_others(call, owner, share) + call.places
                > allowed
            ):
                return Refusal("places", owner)
        tokens = self._tokens(call)
        if tokens is not None and (seconds := tokens.wait(call.tokens)) > 0:
            return Refusal("tokens", seconds=seconds)
        if tokens is not None:
            tokens.change(-call.tokens)
        self.count(call.owners, call.places)
        return None

    def _reserved_for_others(self, call: Call, owner: Owner, share: float) -> int:
        """Returns the number of the owner's free places that are reserved for functions other than the call's."""
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
        if bucket is not None and call.tokens_per_minute is not None:
            bucket.change(unused_tokens)

    def count(self, owners: Sequence[Owner], by: int) -> None:
        """Adds `by` to the places in use of each owner."""
        for owner in owners:
            in_use = self.places_in_use.get(owner.name, 0) + by
            if in_use > 0:
                self.places_in_use[owner.name] = in_use
            else:
                self.places_in_use.pop(owner.name, None)

    def _tokens(self, call: Call) -> Bucket | None:
        tpm = call.tokens_per_minute
        return None if tpm is None else self._bucket((call.tenant, "tokens"), tpm * self._share() / 60, 60.0)

    def _bucket(self, key: tuple[str, str], rate: float, seconds: float) -> Bucket:
        """Returns the key's bucket, refilled until now and with this rate (per second). Its capacity is `seconds` worth
        of the rate, and at least 1. A key without a bucket gets a full one."""
        now, capacity = self._clock(), max(1.0, rate * seconds)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._forget_full(now)
            bucket = self._buckets[key] = Bucket(rate, capacity, now)
        bucket.adjust(rate, capacity, now)
        return bucket

    def _forget_full(self, now: float) -> None:
        """Removes buckets that are full again, since they are equal to new ones. Checks only a few of the oldest, so
        that each call is short."""
        for key in list(self._buckets)[:2] if len(self._buckets) >= IDLE_BUCKETS else ():
            if self._buckets[key].is_full(now):
                del self._buckets[key]
            else:
                self._buckets.move_to_end(key)
