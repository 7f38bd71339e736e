"""Two predictors based on the recent call rate of a function."""

from __future__ import annotations

import numpy as np

from cluster.forecast.predictor import Second, chances_of_rate
from cluster.forecast.table import Array, FunctionTable

WINDOW_S = 30.0
"""Length of the window. Predictive-LoRA found this value to be the best (section V.F)."""
MEMORY_S = 300.0
"""Time in which the weight of a call falls to 1/e."""


class LastWindow:
    """Expects as many calls in the next window as in the last one. The window slides: the previous window counts in
    proportion to the part of the current one that is still to come."""

    def __init__(self, table: FunctionTable, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._begin: float | None = None
        self._before, self._running = table.column(), table.column()

    def observe(self, second: Second) -> None:
        if self._begin is None:
            self._begin = second.now - second.elapsed
        if (windows := int((second.now - second.elapsed - self._begin) // self._window_s)) > 0:
            self._before.live[:] = self._running.live if windows == 1 else 0.0
            self._running.live[:] = 0.0
            self._begin += windows * self._window_s
        self._running.live[second.rows] += second.counts

    def chances(self, now: float) -> Array:
        over = 0.0 if self._begin is None else min(1.0, max(0.0, (now - self._begin) / self._window_s))
        return chances_of_rate((self._running.live + self._before.live * (1 - over)) / self._window_s)


class Ewma:
    """Expects calls at the exponentially weighted moving average of the rate."""

    def __init__(self, table: FunctionTable, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._rate = table.column()
        self._now = 0.0

    def observe(self, second: Second) -> None:
        self._now = second.now
        self._rate.live[:] *= np.float32(np.exp(-second.elapsed / self._memory_s))
        self._rate.live[second.rows] += second.counts / np.float32(self._memory_s)

    def chances(self, now: float) -> Array:
        fading = np.float32(np.exp((self._now - now) / self._memory_s))
        return chances_of_rate(self._rate.live * fading)
