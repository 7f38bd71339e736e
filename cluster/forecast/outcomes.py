"""Store of forecasts that wait for their outcomes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.table import Array, FunctionTable

SLOTS = (1, 5, 5, 5)
"""Number of forecasts of each horizon that wait for their outcomes at once. A forecast is recorded every (horizon /
this number) seconds."""
TOLERANCE_S = 0.5
"""Maximum delay of an outcome's check after the end of its horizon. A later check is dropped, because it would also
count calls after the horizon."""


class Outcomes:
    """Records forecasts, and reports for each one whether a call came within its horizon."""

    def __init__(self, table: FunctionTable, predictors: int) -> None:
        """Creates a store for the log-odds of this number of `predictors`."""
        self._table = table
        self._waiting = [table.column((slots, predictors), fill=np.nan, dtype=np.float16) for slots in SLOTS]
        self._taken_at = [[-np.inf] * slots for slots in SLOTS]

    def resolve_due(self, now: float) -> Iterator[tuple[int, Array, Array, Array]]:
        """Yields (horizon, rows, log-odds, came true) for each forecast whose horizon has ended. `horizon` is an index
        into HORIZONS_S. Rows, i64, are of the functions that were in the table all the time. Log-odds are
        f32[functions, predictors]. The last array, bool[functions], is whether a call came."""
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
        """Records the forecasts of those horizons whose next one is due. `odds` are log-odds f32[functions, horizons,
        predictors], NaN for functions without a forecast."""
        for number, taken_at in enumerate(self._taken_at):
            stride = HORIZONS_S[number] / SLOTS[number]
            if now - max(taken_at) >= stride - TOLERANCE_S and -np.inf in taken_at:
                slot = taken_at.index(-np.inf)
                taken_at[slot] = now
                self._waiting[number].live[:, slot] = odds[:, number]
