"""How much each predictor is believed of a function: the more, the less it was wrong lately."""

from __future__ import annotations

import numpy as np

from cluster.forecast.calibration import log_loss
from cluster.forecast.table import Array, FunctionTable

FADING = (0.998, 0.998, 0.99, 0.98)
"""Of each horizon: what an outcome's loss keeps of its weight with every later outcome."""
TRUST = (2.0, 1.0, 0.6, 0.6)
"""Of each horizon. The longer, the less: forecasts overlap more, so that their outcomes are less evidence of their own.
Chosen, as SHARED_WEIGHT, on the half of the functions that `benchmarks.forecast` does not report on."""
SHARED_WEIGHT = 60.0
"""Outcomes that the mean loss over all functions counts as beside those of one."""
SHARED_FADING = 0.999
"""What the mean over all functions keeps, at every lot of outcomes, of what it knew before."""


class Weights:
    """Mixes predictors. The weight of one for a function is exp(-trust (its faded sum of log losses there +
    SHARED_WEIGHT times its faded mean log loss over all functions)), divided by the sum over all predictors."""

    def __init__(self, table: FunctionTable, horizons: int, predictors: int) -> None:
        self._loss = table.column((horizons, predictors))
        self._shared = np.zeros((horizons, predictors))
        self._outcomes = np.zeros((horizons, 1))
        self._trust = np.array(TRUST, np.float32)[:horizons, None]

    def learn(self, horizon: int, rows: Array, chances: Array, came: Array) -> None:
        """Takes outcomes, bool[functions], of f32[functions, predictors]."""
        loss = log_loss(chances, came)
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
