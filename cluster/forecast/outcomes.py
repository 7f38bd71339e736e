"""Forecasts wait here for their outcomes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.table import Array, FunctionTable

SLOTS = (1, 5, 5, 5)
"""Forecasts of each horizon that wait at once: one is recorded every horizon / slots seconds."""
TOLERANCE_S = 0.5
"""An outcome is dropped if it is checked later than this after its horizon: calls since would count for it."""


class Outcomes:
    """Reports for each recorded forecast whether a call came within its horizon."""

    def __init__(self, table: FunctionTable, predictors: int) -> None:
        """Prepares to record the log-odds of this number of `predictors`."""
        self._table = table
        self._waiting = [table.column((slots, predictors), fill=np.nan, dtype=np.float16) for slots in SLOTS]
        self._taken_at = [[-np.inf] * slots for slots in SLOTS]

    def resolve_due(self, now: float) -> Iterator[tuple[int, Array, Array, Array]]:
        """Yields for each forecast whose horizon is over: the horizon's number, i64 rows of the functions that were in
        the table all the time, their log-odds f32[functions, predictors], and bool[functions] whether a call came."""
        for number, taken_at in enumerate(self._taken_at):
            for slot, at in enumerate(taken_at):
                late = now - at - HORIZONS_S[number]
                if late < -TOLERANCE_S or at == -np.inf:
                    continue
                taken_at[slot] = -np.inf
                odds = self._waiting[number].live[:, slot]
                rows = np.flatnonzero(~np.isnan(odds[:, 0]))
                if late <= TOLERANCE_S and len(rows):
                    yield number, rows, odds[rows].astype(np.float32), self._table.last_call.live[rows] > at

    def record(self, now: float, odds: Array) -> None:
        """Records log-odds f32[functions, horizons, predictors] of those horizons whose next forecast is due. Functions
        that are not forecast have NaN."""
        for number, taken_at in enumerate(self._taken_at):
            stride = HORIZONS_S[number] / SLOTS[number]
            if now - max(taken_at) >= stride - TOLERANCE_S and -np.inf in taken_at:
                slot = taken_at.index(-np.inf)
                taken_at[slot] = now
                self._waiting[number].live[:, slot] = odds[:, number]
