"""How long functions were idle between calls ("Serverless in the Wild", ATC 2020, section 4.2)."""

from __future__ import annotations

import numpy as np

from cluster.forecast.predictor import HORIZONS, Second
from cluster.forecast.table import Array, FunctionTable

EDGES_S = np.array([0, 1, 2, 3, 5, 8, 12, 20, 30, 45, *range(60, 2101, 60)], dtype=np.float64)
"""Ascending; bin i holds the idle times in (edge i, edge i + 1], the last bin longer ones. A minute wide as in the
paper, finer below one. The last edge is a horizon behind the longest idle time of which a forecast is made."""
SHARED_WEIGHT = 2.0
"""Idle times that the histogram of all functions counts as in that of one."""
HALF_LIFE = 64.0
"""After so many more of its idle times, one counts half in a function's histogram."""
SHARED_HALF_LIFE = 200_000.0
"""The same of the histogram of all functions."""


class IdleTimes:
    """The chance that an idle time which has lasted so long already ends within a horizon, by the function's own
    histogram of them and that of all functions. Inside a bin, idle times are spread evenly."""

    def __init__(self, table: FunctionTable) -> None:
        bins = len(EDGES_S)
        self._last_call = table.last_call
        self._own = table.column((bins,))
        self._shared = np.ones(bins)

    def observe(self, second: Second) -> None:
        bins = np.maximum(np.searchsorted(EDGES_S, second.idle, side="left") - 1, 0)
        self._own.live[second.rows] *= np.float32(0.5 ** (1 / HALF_LIFE))
        self._own.live[second.rows, bins] += 1
        self._shared *= 0.5 ** (len(bins) / SHARED_HALF_LIFE)
        self._shared += np.bincount(bins, minlength=len(self._shared))

    def chances(self, now: float) -> Array:
        shared = np.float32(SHARED_WEIGHT) * (self._shared / self._shared.sum()).astype(np.float32)
        survival = np.cumsum((self._own.live + shared)[:, ::-1], axis=1)[:, ::-1]
        """f32[functions, edges]: idle times longer than each edge"""
        idle = now - self._last_call.live
        lasting = np.maximum(_at(survival, idle), np.float32(1e-6))
        ending = np.stack([_at(survival, idle + horizon) for horizon in HORIZONS], axis=1)
        chances: Array = np.clip(1 - ending / lasting[:, None], 0.0, 1.0)
        return chances


def _at(survival: Array, idle: Array) -> Array:
    """f32[functions]: each row of `survival` at its idle time, linear between edges."""
    idle = np.clip(idle, 0.0, EDGES_S[-1])
    edge = np.minimum(np.searchsorted(EDGES_S, idle, side="right") - 1, len(EDGES_S) - 2)
    part = ((idle - EDGES_S[edge]) / (EDGES_S[edge + 1] - EDGES_S[edge])).astype(np.float32)
    row = np.arange(len(survival))
    found: Array = survival[row, edge] * (1 - part) + survival[row, edge + 1] * part
    return found
