"""Corrections of cold-start forecasts by observed times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

import numpy as np

from cluster.least_squares import nonnegative
from node_agent.coldstart.profile import LinkCost

MIN_CORRECTION, MAX_CORRECTION = 0.25, 16.0
RATE = 0.3
"""Weight of one observation, 0 to 1, in the moving average of the logarithms of observed / forecast."""
LOADS_KEPT = 16
REFIT_S = 1.0
MIN_LOAD_S, MAX_LOAD_S = 1e-3, 1e3
"""Minimum and maximum duration of the loads that are used, in seconds."""
PROFILE_SIZES = (1 << 20, 1 << 27)
"""Sizes, in bytes, of two assumed loads at the profile's cost of the link. Together they weigh as much as two new
observations."""
HOST_FADE_S = 120.0
"""Half-life, in seconds, of the correction of the engine's speed; hosts stay slow for minutes."""
HOST_RATE = 0.7
"""Weight of one pass, 0 to 1, in the correction of the engine's speed. It is high, since one pass shows the speed
almost exactly."""
FADE_S = 10.0
"""Half-life, in seconds, of all other corrections. It is short, so that a plan that once seemed slow is tried again."""


class Correction:
    """Correction factor of a forecast: a moving geometric mean of observed / forecast that decays to 1.

    It stays between MIN_CORRECTION and MAX_CORRECTION.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, fade_s: float = FADE_S, rate: float = RATE) -> None:
        """`fade_s`: half-life in seconds; `rate`: weight of one observation, in logarithms."""
        self._clock, self._value, self._at, self._fade_s, self._rate = clock, 1.0, clock(), fade_s, rate

    @property
    def value(self) -> float:
        age: float = max(0.0, self._clock() - self._at)
        return float(self._value ** (0.5 ** (age / self._fade_s)))

    def learn(self, forecast: float, observed: float, at_most: bool = False) -> None:
        """Updates the factor with one observation. `forecast` and `observed` are in seconds; a forecast of 0 is
        ignored. `at_most`: whether `observed` is only an upper bound."""
        if not (forecast > 0 and observed >= 0):
            return
        old = self.value
        ratio = min(MAX_CORRECTION, max(MIN_CORRECTION, observed / forecast))
        if at_most:
            ratio = min(ratio, old)
        self._value, self._at = old * (ratio / old) ** self._rate, self._clock()


def engine_correction() -> Correction:
    """Returns a correction of the engine's speed that has learnt nothing yet."""
    return Correction(fade_s=HOST_FADE_S, rate=HOST_RATE)


class LearntLink:
    """Cost of the link from host memory to the device: the profile's, corrected by observed loads.

    Loads of one size cannot separate latency from bandwidth. Therefore both values of the profile are first scaled by
    one factor, the geometric mean of observed / forecast. Then `latency + bytes / bandwidth` is fitted to the scaled
    profile and the loads by least squares of relative errors. A load's weight halves every FADE_S.
    """

    def __init__(self, profile: LinkCost, clock: Callable[[], float] = time.monotonic) -> None:
        self.profile, self._clock = profile, clock
        self._loads: deque[tuple[float, int, float]] = deque(maxlen=LOADS_KEPT)
        self._cost, self._made_at = profile, clock()

    @property
    def cost(self) -> LinkCost:
        """Returns the cost of the link, fitted again after REFIT_S."""
        if self._loads and self._clock() > self._made_at + REFIT_S:
            self._fit()
        return self._cost

    def learn(self, size: int, seconds: float) -> None:
        """Records that `size` bytes crossed in `seconds` during which the link was never idle. Ignores very short
        times, which measure thread wake-ups rather than the link."""
        if size > 0 and MIN_LOAD_S < seconds < MAX_LOAD_S:
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
        per_byte = min(max(float(per_byte), MIN_CORRECTION / bandwidth), MAX_CORRECTION / bandwidth)
        self._cost = LinkCost(min(float(latency), MAX_LOAD_S), 1 / per_byte)


@dataclass(frozen=True)
class Outcome:
    """Planned and measured times of one cold chunk, in seconds."""

    request: str
    plan: str
    tokens: int
    forecast: float
    """forecast seconds from the plan to the end of the last layer"""
    seconds: float
    """measured seconds from the plan to the end of the last layer, including other passes in between"""
    exposed_forecast: float
    exposed: float
    """seconds of waiting for adapter bytes"""
    waited: float
    """seconds of waiting for CPU workers"""
    computed: float
    """engine seconds for the layers, without waits for CPU workers"""
    layers_cpu: int
    layers_device: int
    """number of the chunk's layers whose LoRA terms the device computed; the previous field counts those of CPU
    workers"""
    other_requests: int = 0
    """number of other requests, which may have had passes in between"""
    by_profile: float = 0.0
    """forecast seconds by the profile alone; 0 if the chunk shared the engine or the link"""
