"""Predictor based on the idle times between a function's calls ("Serverless in the Wild", ATC 2020)."""

from __future__ import annotations

import numpy as np

from cluster.forecast.predictor import HORIZONS, Second
from cluster.forecast.table import Array, FunctionTable

EDGES_S = np.array([0, 1, 2, 3, 5, 8, 12, 20, 30, 45, *range(60, 2101, 60)], dtype=np.float64)
"""Edges of the histogram's bins, in seconds. Bin i has the idle times in (edge i, edge i + 1]; the last bin has all
longer ones. Bins are one minute wide as in the paper, and finer below a minute. The last edge is the longest idle time
used for forecasts, plus the longest horizon."""
WIDTHS_S = np.diff(EDGES_S)
SHARED_WEIGHT = 2.0
"""Weight, in idle times, of the histogram of all functions in that of each function."""
HALF_LIFE = 64.0
"""Half-life, in later idle times of the same function, of an idle time's weight."""
SHARED_HALF_LIFE = 200_000.0
"""Half-life, in idle times of any function, of an idle time's weight in the histogram of all functions."""


class IdleTimes:
    """Forecasts the end of each function's current idle time, from two histograms of idle times: the function's, and
    that of all functions. Within a bin, idle times are assumed to be uniformly distributed."""

    def __init__(self, table: FunctionTable) -> None:
        self._last_call = table.last_call
        self._counts = table.column((len(EDGES_S),))
        """Weights f32[functions, edges] of each function's idle times that were longer than each edge."""
        self._shared = np.arange(len(EDGES_S), 0.0, -1.0)
        """Weights f64[edges] of all functions' idle times that were longer than each edge. At first there is one idle
        time in each bin."""

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
        """Returns the weight f32[functions] of idle times longer than `idle` f64[functions] seconds, interpolated
        linearly between edges."""
        idle = np.minimum(idle, EDGES_S[-1])
        edge = np.clip(np.searchsorted(EDGES_S, idle, side="right") - 1, 0, len(EDGES_S) - 2)
        part = ((idle - EDGES_S[edge]) / WIDTHS_S[edge]).astype(np.float32)
        shared = (SHARED_WEIGHT * self._shared / self._shared[0]).astype(np.float32)
        counts, at = self._counts.live.ravel(), np.arange(len(idle)) * len(EDGES_S) + edge
        weight: Array = (counts[at] + shared[edge]) * (1 - part) + (counts[at + 1] + shared[edge + 1]) * part
        return weight
