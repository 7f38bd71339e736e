"""The leader's history of calls, and its forecasts.

The forecaster runs in its own thread, one call at a time, because with 40,000 functions it takes longer than the event
loop may be blocked. A new leader starts with an empty history and forecasts nothing for WATCH_SECONDS.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cluster.forecast.chances import Chances, Likely
from cluster.forecast.forecaster import Forecaster
from cluster.messages import Adapter
from gateway.catalog.threads import LeavableThreads
from gateway.residency.arrivals import Arrival, function_key
from gateway.residency.messages import WATCH_SECONDS

GAP_SECONDS = 10.0
"""Seconds after the last `observe` from which a worker counts as a new leader. A new leader starts with an empty
history."""
MAX_FUNCTIONS = 40_000
"""Maximum functions whose called versions are remembered; the least recently called one is forgotten."""
MAX_VERSIONS = 8
"""Maximum versions of one function; the least called one is forgotten."""
MANY_CALLS = 64
"""Number of counted calls of a function at which its versions' counts are halved. So the versions' shares follow recent
calls."""
MIN_CHANCE = 0.1
"""Minimum probability of a call within 30 s at which an adapter is loaded on a node."""
MAX_CHOSEN = 4096
"""Maximum functions whose adapters are considered in a plan, the most likely first."""


class Forecast(NamedTuple):
    """Forecast of all functions at one time."""

    chances: Mapping[str, Chances]
    likely: list[Likely]
    error: Mapping[str, float]


NOTHING = Forecast({}, [], {})


class CallHistory:
    """The leader's history of calls. `clock`: monotonic seconds. `unix`: Unix time, for daily and hourly patterns."""

    def __init__(
        self, make_forecaster: Callable[[], Forecaster], clock: Callable[[], float], unix: Callable[[], float]
    ) -> None:
        self._make_forecaster, self._clock, self._unix = make_forecaster, clock, unix
        self._thread = LeavableThreads(1)
        self._begin(-math.inf)

    def _begin(self, now: float) -> None:
        self._forecaster = self._make_forecaster()
        self._counts: Counter[str] = Counter()
        self._versions: OrderedDict[str, dict[str, tuple[Adapter, float]]] = OrderedDict()
        """Versions that were called, by function and digest. Each is the adapter with its number of recent calls."""
        self._since = self._observed = now
        self.latest = NOTHING

    @property
    def observes(self) -> bool:
        """Returns whether this worker is the leader: it has observed within the last GAP_SECONDS."""
        return self._clock() - self._observed < GAP_SECONDS

    @property
    def watched(self) -> float:
        """Returns the seconds since this worker began to observe; 0 if it does not observe."""
        return self._clock() - self._since if self.observes else 0.0

    def count(self, arrivals: Iterable[Arrival]) -> None:
        """Adds counted calls. Does nothing on a worker that does not observe."""
        if not self.observes:
            return
        for arrival in arrivals:
            if arrival.key in self._counts or len(self._counts) < MAX_FUNCTIONS:
                self._counts[arrival.key] += arrival.calls
                self._record_version(arrival)

    def forget(self, tenant: str, function: str) -> None:
        """Forgets which versions a changed function's calls use."""
        self._versions.pop(function_key(tenant, function), None)

    def learn(self, key: str, versions: Iterable[tuple[Adapter, float]]) -> None:
        """Sets the versions that the function's calls use according to its aliases, each with its share of the calls.
        Counted calls then refine these shares."""
        self._versions[key] = {adapter.digest: (adapter, share) for adapter, share in versions}
        self._limit_functions()

    def versions(self, key: str) -> list[tuple[Adapter, float]] | None:
        """Returns the adapters of the function's recent calls, each with its share of them; None if unknown."""
        by_digest = self._versions.get(key)
        if by_digest is None:
            return None
        calls = sum(count for _, count in by_digest.values())
        return [(adapter, count / calls) for adapter, count in by_digest.values()]

    async def observe(self) -> None:
        """Passes the counts since the last `observe` to the forecaster. Must be called every second."""
        now = self._clock()
        if now - self._observed >= GAP_SECONDS:
            self._begin(now)
        self._observed = now
        counts, self._counts, forecaster, unix = self._counts, Counter(), self._forecaster, self._unix()
        await self._thread.run(lambda: forecaster.observe(unix, counts))

    async def forecast(self) -> Forecast:
        """Returns the current forecast; NOTHING in the first WATCH_SECONDS."""
        if self.watched < WATCH_SECONDS:
            return NOTHING
        forecaster, unix = self._forecaster, self._unix()
        self.latest = await self._thread.run(lambda: _forecast(forecaster, unix))
        return self.latest

    def _record_version(self, arrival: Arrival) -> None:
        versions = self._versions.setdefault(arrival.key, {})
        self._versions.move_to_end(arrival.key)
        digest = arrival.adapter.digest
        versions[digest] = (arrival.adapter, versions.get(digest, (arrival.adapter, 0))[1] + arrival.calls)
        if sum(count for _, count in versions.values()) > MANY_CALLS:
            halved = {each: (adapter, count / 2) for each, (adapter, count) in versions.items() if count >= 1}
            self._versions[arrival.key] = versions = halved
        if len(versions) > MAX_VERSIONS:
            del versions[min(versions, key=lambda each: versions[each][1])]
        self._limit_functions()

    def _limit_functions(self) -> None:
        if len(self._versions) > MAX_FUNCTIONS:
            self._versions.popitem(last=False)


def _forecast(forecaster: Forecaster, unix: float) -> Forecast:
    chances = forecaster.forecast(unix)
    return Forecast(chances, chances.likeliest(MIN_CHANCE, MAX_CHOSEN), forecaster.error())
