"""What forecasts of cold starts learn from what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LEAST, MOST = 0.25, 16.0
"""Bounds of a correction, whatever is observed."""
RATE = 0.3
"""Weight of one observation, in logarithms."""
FADE_S = 10.0
"""Seconds in which half of a correction is forgotten: what is not chosen any more for seeming slow is tried again."""


class Correction:
    """A factor for a forecast: a moving geometric mean of observed / forecast, between LEAST and MOST, fading to 1."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._value, self._at = clock, 1.0, clock()

    @property
    def value(self) -> float:
        age: float = max(0.0, self._clock() - self._at)
        return float(self._value ** (0.5 ** (age / FADE_S)))

    def learn(self, forecast: float, observed: float, at_most: bool = False) -> None:
        """`at_most`: it took no longer than `observed`, nobody knows how long. Forecasts of nothing teach nothing."""
        if not (forecast > 0 and observed >= 0):
            return
        old = self.value
        seen = min(MOST, max(LEAST, observed / forecast))
        if at_most:
            seen = min(seen, old)
        self._value, self._at = old * (seen / old) ** RATE, self._clock()


@dataclass(frozen=True)
class Outcome:
    """What came of one cold chunk, beside what was planned. Seconds."""

    request: str
    plan: str
    tokens: int
    forecast: float
    """from the plan to the chunk's last layer"""
    seconds: float
    """the same in fact, other passes between included"""
    exposed_forecast: float
    exposed: float
    """of `seconds`, standing still for adapter bytes"""
    waited: float
    """of `seconds`, for CPU workers"""
    layers_cpu: int
    layers_device: int
    """of the chunk, by where the adapter's part was computed"""
    others: int = 0
    """requests that may have had passes in between"""
