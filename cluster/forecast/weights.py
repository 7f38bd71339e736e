"""Mixture of predictors, weighted by their recent accuracy."""

from __future__ import annotations

import numpy as np

from cluster.forecast.calibration import log_loss
from cluster.forecast.table import Array, FunctionTable

FADING = (0.998, 0.998, 0.99, 0.98)
"""Factors, by horizon, by which an outcome multiplies the weight of earlier losses of its function."""
TRUST = (2.0, 1.0, 0.6, 0.6)
"""Weight of one nat of loss, by horizon. Forecasts of longer horizons overlap more, so each outcome is weaker evidence.
TRUST and SHARED_WEIGHT were chosen on functions that `benchmarks/forecast` does not report on."""
SHARED_WEIGHT = 60.0
"""Weight, in outcomes of each function, of the mean loss over all functions."""
SHARED_FADING = 0.999
"""Factor by which each batch of outcomes multiplies the weight of earlier ones in the mean over all functions."""


class Weights:
    """Mixes predictors by weights for each function and horizon. A predictor's weight is exp(-trust * loss), divided by
    the sum over all predictors. Its loss is the faded sum of its log losses for the function, plus SHARED_WEIGHT times
    its faded mean log loss over all functions."""

    def __init__(self, table: FunctionTable, horizons: int, predictors: int) -> None:
        self._loss = table.column((horizons, predictors))
        self._shared = np.zeros((horizons, predictors))
        self._outcomes = np.zeros((horizons, 1))
        self._trust = np.array(TRUST, np.float32)[:horizons, None]

    def learn(self, horizon: int, rows: Array, chances: Array, outcomes: Array) -> None:
        """Adds the log losses of forecasts of one horizon. `horizon` is an index into HORIZONS_S. `chances` is
        f32[functions, predictors]; `outcomes` bool[functions] is whether a call came."""
        loss = log_loss(chances, outcomes)
        self._loss.live[rows, horizon] = self._loss.live[rows, horizon] * np.float32(FADING[horizon]) + loss
        self._shared[horizon] = self._shared[horizon] * SHARED_FADING + loss.sum(axis=0)
        self._outcomes[horizon] = self._outcomes[horizon] * SHARED_FADING + len(rows)

    def mix(self, chances: Array) -> Array:
        """Returns the mixed chances f32[functions, horizons]: weighted means of `chances` f32[functions, horizons,
        predictors]."""
        mean: Array = (self._shared / np.maximum(self._outcomes, 1.0)).astype(np.float32)
        belief = -self._trust * (self._loss.live + np.float32(SHARED_WEIGHT) * mean)
        weights = np.exp(belief - belief.max(axis=2, keepdims=True))
        mixed: Array = np.einsum("fhp,fhp->fh", weights, chances) / np.einsum("fhp->fh", weights)
        return mixed
