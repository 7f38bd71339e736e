"""Corrections of cold start forecasts by what was observed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

import numpy as np

from cluster.least_squares import nonnegative
from node_agent.coldstart.profile import LinkCost

LEAST, MOST = 0.25, 16.0
"""Bounds of a correction, whatever is observed."""
RATE = 0.3
"""Weight of one observation, in logarithms."""
LOADS_KEPT = 16
REFIT_S = 1.0
MIN_LOAD_S, LONGEST_LOAD_S = 1e-3, 1e3
"""Bounds of the loads that are learnt from."""
PROFILE_SIZES = (1 << 20, 1 << 27)
"""Bytes of two loads by which the profile counts as much as two fresh observations."""
HOST_FADE_S = 120.0
"""Seconds in which half of what was learnt of the engine's own speed is forgotten: hosts stay slow for minutes."""
HOST_RATE = 0.7
"""Weight of one pass in what is learnt of the engine's own speed: a pass shows it nearly exactly."""
FADE_S = 10.0
"""Seconds in which half of a correction is forgotten: what is not chosen any more for seeming slow is tried again."""


class Correction:
    """A factor for a forecast: a moving geometric mean of observed / forecast, between LEAST and MOST, fading to 1."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, fade_s: float = FADE_S, rate: float = RATE) -> None:
        """`fade_s`: seconds in which half of the correction is forgotten; `rate`: weight of one observation, in
        logarithms."""
        self._clock, self._value, self._at, self._fade_s, self._rate = clock, 1.0, clock(), fade_s, rate

    @property
    def value(self) -> float:
        age: float = max(0.0, self._clock() - self._at)
        return float(self._value ** (0.5 ** (age / self._fade_s)))

    def learn(self, forecast: float, observed: float, at_most: bool = False) -> None:
        """`at_most`: it took no longer than `observed`, nobody knows how long. Forecasts of nothing teach nothing."""
        if not (forecast > 0 and observed >= 0):
            return
        old = self.value
        ratio = min(MOST, max(LEAST, observed / forecast))
        if at_most:
            ratio = min(ratio, old)
        self._value, self._at = old * (ratio / old) ** self._rate, self._clock()


class LearntLink:
    """Cost of the link from host memory to the device: the profile's, corrected by loads that were observed.

    Loads of one size can't separate latency from bandwidth, so first both of the profile's are changed by one factor,
    the geometric mean of what loads took over its forecast. Then `latency + bytes / bandwidth` is fitted to that line
    and the loads, by least squares of relative errors. A load counts half as much after FADE_S.
    """

    def __init__(self, profile: LinkCost, clock: Callable[[], float] = time.monotonic) -> None:
        self.profile, self._clock = profile, clock
        self._loads: deque[tuple[float, int, float]] = deque(maxlen=LOADS_KEPT)
        self._cost, self._made_at = profile, clock()

    @property
    def cost(self) -> LinkCost:
        if self._loads and self._clock() > self._made_at + REFIT_S:
            self._fit()
        return self._cost

    def learn(self, size: int, seconds: float) -> None:
        """Records that `size` bytes crossed in `seconds` in which the link had always something to carry. Ignores a
        time that is too short: it says how fast threads wake up, and nothing of the link."""
        if size > 0 and MIN_LOAD_S < seconds < LONGEST_LOAD_S:
            self._loads.append((self._clock(), size, seconds))
            self._fit()

    def _by_profile(self, size: int) -> float:
        return self.profile.latency + size / self.profile.bandwidth

    def _fit(self) -> None:
        self._made_at = now = self._clock()
        observed = [(size, seconds, 0.5 ** ((now - at) / FADE_S)) for at, size, seconds in self._loads]
        longer = sum(weight * log(seconds / self._by_profile(size)) for size, seconds, weight in observed)
        factor = exp(longer / (1.0 + sum(weight for *_, weight in observed)))
        prior = [(size, factor * self._by_profile(size), 1.0) for size in PROFILE_SIZES]
        sizes, seconds, weights = np.array(prior + observed).T
        scale = np.sqrt(weights) / seconds
        columns = np.column_stack((scale, sizes * scale))
        latency, per_byte = nonnegative(columns, np.sqrt(weights))
        bandwidth = self.profile.bandwidth
        per_byte = min(max(float(per_byte), LEAST / bandwidth), MOST / bandwidth)
        self._cost = LinkCost(min(float(latency), LONGEST_LOAD_S), 1 / per_byte)


@dataclass(frozen=True)
class Outcome:
    """Times of one cold chunk as it was computed, and as it was planned. Seconds."""

    request: str
    plan: str
    tokens: int
    forecast: float
    """forecast of the seconds from the plan to the chunk's last layer"""
    seconds: float
    """measured seconds, other passes between included"""
    exposed_forecast: float
    exposed: float
    """seconds of stalls for adapter bytes"""
    waited: float
    """seconds of waits for CPU workers"""
    computed: float
    """engine time of the layers, without waits for CPU workers"""
    layers_cpu: int
    layers_device: int
    """layers of the chunk, by where the adapter's part was computed"""
    other_requests: int = 0
    """requests that may have had passes in between"""
    by_profile: float = 0.0
    """forecast by the profile alone; 0: the chunk did not have engine and link for itself"""
