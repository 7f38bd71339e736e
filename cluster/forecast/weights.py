"""Predictors are mixed by what they got right lately."""

from __future__ import annotations

import numpy as np

from cluster.forecast.calibration import log_loss
from cluster.forecast.table import Array, FunctionTable

FADING = (0.998, 0.998, 0.99, 0.98)
"""Factors, by horizon, by which an outcome multiplies the weight of earlier losses of its function."""
TRUST = (2.0, 1.0, 0.6, 0.6)
"""Weights, by horizon, of a nat of loss. Forecasts of longer horizons overlap more, so that each outcome is less
evidence. TRUST and SHARED_WEIGHT were chosen on the functions that `benchmarks/forecast` does not report on."""
SHARED_WEIGHT = 60.0
"""Outcomes of each function as which the mean loss over all functions counts."""
SHARED_FADING = 0.999
"""Each batch of outcomes multiplies the weight of earlier ones in the mean over all functions by this."""


class Weights:
    """Mixes predictors. The weight of one for a function is exp(-trust (its faded sum of log losses there +
    SHARED_WEIGHT times its faded mean log loss over all functions)), divided by the sum over all predictors."""

    def __init__(self, table: FunctionTable, horizons: int, predictors: int) -> None:
        self._loss = table.column((horizons, predictors))
        self._shared = np.zeros((horizons, predictors))
        self._outcomes = np.zeros((horizons, 1))
        self._trust = np.array(TRUST, np.float32)[:horizons, None]

    def learn(self, horizon: int, rows: Array, chances: Array, outcomes: Array) -> None:
        """Adds outcomes, bool[functions], of f32[functions, predictors] forecasts."""
        loss = log_loss(chances, outcomes)
        self._loss.live[rows, horizon] = self._loss.live[rows, horizon] * np.float32(FADING[horizon]) + loss
        self._shared[horizon] = self._shared[horizon] * SHARED_FADING + loss.sum(axis=0)
        self._outcomes[horizon] = self._outcomes[horizon] * SHARED_FADING + len(rows)

    def mix(self, chances: Array) -> Array:
        """Returns f32[functions, horizons], the weighted means of f32[functions, horizons, predictors]."""
        mean: Array = (self._shared / np.maximum(self._outcomes, 1.0)).astype(np.float32)
        belief = -self._trust * (self._loss.live + np.float32(SHARED_WEIGHT) * mean)
        weights = np.exp(belief - belief.max(axis=2, keepdims=True))
        mixed: Array = np.einsum("fhp,fhp->fh", weights, chances) / np.einsum("fhp->fh", weights)
        return mixed
