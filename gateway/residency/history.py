"""The leader's history of calls, and its forecasts.

The forecaster runs in its own thread, one call at a time: with 40,000 functions it takes longer than the event loop may
be held up. A new leader begins without any, and forecasts nothing until it has watched for a while.
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
"""Pause after which a worker that has not observed was not the leader, and begins again."""
MAX_FUNCTIONS = 40_000
"""Functions whose versions are known; those of the one that was called least recently are forgotten."""
MAX_VERSIONS = 8
"""Versions of one function; the one that was called least is forgotten."""
MANY_CALLS = 64
"""Calls of a function's versions after which all counts are halved: shares follow what is called lately."""
MIN_CHANCE = 0.1
"""Least chance of a call within 30 s for which an adapter is brought anywhere."""
MAX_CHOSEN = 4096
"""Functions whose adapters are considered, likeliest first."""


class Forecast(NamedTuple):
    """All that is forecast at one time."""

    chances: Mapping[str, Chances]
    """Chances by function."""
    likely: list[Likely]
    """The likeliest first."""
    error: Mapping[str, float]


NOTHING = Forecast({}, [], {})


class CallHistory:
    """`clock`: monotonic seconds; `unix`: the time of day, by which days and hours are learnt."""

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
        """Versions by function and digest: the adapter, and how often it was called of late."""
        self._since = self._observed = now
        self.latest = NOTHING

    @property
    def observes(self) -> bool:
        """Returns whether this worker leads, as far as is known here."""
        return self._clock() - self._observed < GAP_SECONDS

    @property
    def watched(self) -> float:
        """Returns the seconds since it began to observe; 0 where it does not."""
        return self._clock() - self._since if self.observes else 0.0

    def count(self, arrivals: Iterable[Arrival]) -> None:
        """Does nothing on a worker that does not observe."""
        if not self.observes:
            return
        for arrival in arrivals:
            if arrival.key in self._counts or len(self._counts) < MAX_FUNCTIONS:
                self._counts[arrival.key] += arrival.calls
                self._record_version(arrival)

    def forget(self, tenant: str, function: str) -> None:
        """The function was changed: which versions its calls get is not known any more."""
        self._versions.pop(function_key(tenant, function), None)

    def learn(self, key: str, versions: Iterable[tuple[Adapter, float]]) -> None:
        """Takes in what the function's calls get by its aliases, with the shares, until calls show it."""
        self._versions[key] = {adapter.digest: (adapter, share) for adapter, share in versions}
        self._limit_functions()

    def versions(self, key: str) -> list[tuple[Adapter, float]] | None:
        """Returns the adapters that the function's calls got lately, with their shares of them; None where that is not
        known."""
        by_digest = self._versions.get(key)
        if by_digest is None:
            return None
        calls = sum(count for _, count in by_digest.values())
        return [(adapter, count / calls) for adapter, count in by_digest.values()]

    async def observe(self) -> None:
        """Has the forecaster learn what was counted since the last time. To be called each second."""
        now = self._clock()
        if now - self._observed >= GAP_SECONDS:
            self._begin(now)
        self._observed = now
        counts, self._counts, forecaster, unix = self._counts, Counter(), self._forecaster, self._unix()
        await self._thread.run(lambda: forecaster.observe(unix, counts))

    async def forecast(self) -> Forecast:
        """Returns what will probably be called; NOTHING before it was watched for WATCH_SECONDS."""
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
