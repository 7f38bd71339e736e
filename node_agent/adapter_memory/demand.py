"""Demand for each adapter: its rate of calls, and the forecast of coming calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, expm1, log, log1p

RECENT_S = 120.0
LONG_S = 3600.0
"""Time constants, in seconds, of two exponentially decaying counts of calls: RECENT_S is for recency, LONG_S for
frequency. Like FORECAST_WEIGHT, they were tuned on one half of the traces of benchmarks/adapter_memory/eviction.py."""
FORECAST_S = 30.0
"""Period in seconds, from now on, to which the probabilities of a call in `expect` refer."""
FORECAST_WEIGHT = 1 / 3
"""Weight, 0 to 1, of a forecast rate if there is one. The rates by recency and by frequency share the rest."""
RARELY, SURELY = 0.001, 0.99
"""Bounds within which a forecast probability, 0 to 1, is taken literally. A lower one only says "at most RARELY", a
higher one "at least SURELY"."""
MAX_REMEMBERED = 8192
"""Maximum adapters whose calls are remembered; the least recently called are dropped."""
_DECAY = (1 / RECENT_S + 1 / LONG_S) / 2
_LOG_WINDOWS = (log(RECENT_S) + log(LONG_S)) / 2


@dataclass(slots=True)
class _Calls:
    """Call counts of one adapter."""

    last: float
    """time of the last call, in monotonic seconds"""
    recent: float = 1.0
    long: float = 1.0
    """counts of calls up to `last`: the previous field decays with RECENT_S, this one with LONG_S"""
    count: int = 1

    def add(self, now: float) -> None:
        gap = max(0.0, now - self.last)
        self.recent = self.recent * exp(-gap / RECENT_S) + 1
        self.long = self.long * exp(-gap / LONG_S) + 1
        self.last, self.count = now, self.count + 1


class Demand:
    """Call rates by adapter, shared by both tiers of a node."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, _Calls] = OrderedDict()
        """call counts by digest, in order of the last call, oldest first"""
        self._levels: dict[str, float] = {}
        """Logarithm of the call rate from past calls plus `_DECAY` x time, by digest. It is constant between two
        calls."""
        self._forecast: dict[str, tuple[float, bool]] = {}
        """Logarithm of the forecast rate, and whether the rate is only a lower bound, by digest."""

    def record_call(self, digest: str, now: float) -> None:
        """Counts one call of the adapter at `now` (monotonic seconds)."""
        calls = self._calls.get(digest)
        if calls is None:
            calls = self._calls[digest] = _Calls(now)
            if len(self._calls) > MAX_REMEMBERED:
                del self._levels[self._calls.popitem(last=False)[0]]
        else:
            calls.add(now)
            self._calls.move_to_end(digest)
        self._levels[digest] = (log(calls.recent) + log(calls.long)) / 2 - _LOG_WINDOWS + calls.last * _DECAY

    def calls(self, digest: str) -> int:
        """Returns the number of remembered calls; 0 for an unknown adapter."""
        rate = self._calls.get(digest)
        return rate.count if rate is not None else 0

    def last_call(self, digest: str) -> float:
        """Returns the time of the last call in monotonic seconds; 0 if none is remembered."""
        rate = self._calls.get(digest)
        return rate.last if rate is not None else 0.0

    def expect(self, chances: Mapping[str, float]) -> None:
        """Replaces the forecast: the probability, by digest, of a call within FORECAST_S. Raises ValueError unless each
        is between 0 and 1."""
        for digest, chance in chances.items():
            if not 0 <= chance <= 1:
                raise ValueError(f"the chance of a call of adapter {digest} is {chance}: expected 0 to 1")
        self._forecast = {
            digest: (log(-log1p(-min(max(chance, RARELY), SURELY)) / FORECAST_S), chance >= SURELY)
            for digest, chance in chances.items()
        }

    def log_rate(self, digest: str, since: float, now: float) -> float:
        """Returns the logarithm of the expected calls per second. It is the geometric mean of the rates by recency,
        frequency and, if there is one, forecast. An adapter without remembered calls counts as called once, at
        `since`."""
        level = self._levels.get(digest)
        log_own_rate = (since * _DECAY - _LOG_WINDOWS if level is None else level) - now * _DECAY
        forecast = self._forecast.get(digest)
        if forecast is None:
            return log_own_rate
        rate, at_least = forecast
        return log_own_rate + FORECAST_WEIGHT * (
            max(rate, log_own_rate) - log_own_rate if at_least else rate - log_own_rate
        )

    def chance(self, digest: str, now: float) -> float:
        """Returns the probability, 0 to 1, of a call within FORECAST_S at the expected rate. An adapter without
        remembered calls counts as called once, now."""
        return -expm1(-FORECAST_S * exp(self.log_rate(digest, now, now)))
