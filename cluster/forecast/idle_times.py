"""Forecasts from how long functions were idle between calls ("Serverless in the Wild", ATC 2020)."""

from __future__ import annotations

import numpy as np

from cluster.forecast.predictor import HORIZONS, Second
from cluster.forecast.table import Array, FunctionTable

EDGES_S = np.array([0, 1, 2, 3, 5, 8, 12, 20, 30, 45, *range(60, 2101, 60)], dtype=np.float64)
"""Bin i holds the idle times in (edge i, edge i + 1], the last bin all longer ones. Bins are a minute wide as in the
paper, finer below a minute. The last edge is the longest idle time that is forecast from, plus the longest horizon."""
WIDTHS_S = np.diff(EDGES_S)
SHARED_WEIGHT = 2.0
"""Idle times as which the histogram of all functions counts in that of each function."""
HALF_LIFE = 64.0
"""Later idle times of its function after which one counts half."""
SHARED_HALF_LIFE = 200_000.0
"""Later idle times after which one counts half in the histogram of all functions."""


class IdleTimes:
    """Forecasts the end of the idle time that a function is in, by its own histogram of idle times and that of all
    functions. Inside a bin, idle times are taken to be spread evenly."""

    def __init__(self, table: FunctionTable) -> None:
        self._last_call = table.last_call
        self._counts = table.column((len(EDGES_S),))
        """Weight of the function's idle times that were longer than each edge"""
        self._shared = np.arange(len(EDGES_S), 0.0, -1.0)
        """The same for all functions; it starts with one idle time in each bin."""

    def observe(self, second: Second) -> None:
        longer = second.idle[:, None] > EDGES_S
        longer[:, 0] = True  # also the idle time of a second that was observed twice
        self._counts.live[second.rows] = self._counts.live[second.rows] * np.float32(0.5 ** (1 / HALF_LIFE)) + longer
        self._shared *= 0.5 ** (len(longer) / SHARED_HALF_LIFE)
        self._shared += longer.sum(axis=0)

    def chances(self, now: float) -> Array:
        idle = now - self._last_call.live
        lasting = np.maximum(self._longer(idle), np.float32(1e-6))
        ending = np.stack([self._longer(idle + horizon) for horizon in HORIZONS], axis=1)
        chances: Array = np.clip(1 - ending / lasting[:, None], 0.0, 1.0)
        return chances

    def _longer(self, idle: Array) -> Array:
        """Returns f32[functions], the weight of idle times longer than f64[functions]; it is linear between edges."""
        idle = np.minimum(idle, EDGES_S[-1])
        edge = np.clip(np.searchsorted(EDGES_S, idle, side="right") - 1, 0, len(EDGES_S) - 2)
        part = ((idle - EDGES_S[edge]) / WIDTHS_S[edge]).astype(np.float32)
        shared = (SHARED_WEIGHT * self._shared / self._shared[0]).astype(np.float32)
        counts, at = self._counts.live.ravel(), np.arange(len(idle)) * len(EDGES_S) + edge
        weight: Array = (counts[at] + shared[edge]) * (1 - part) + (counts[at + 1] + shared[edge + 1]) * part
        return weight
