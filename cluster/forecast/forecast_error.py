"""The forecasts' error, for `/metrics`."""

from __future__ import annotations

import numpy as np

from cluster.forecast.calibration import log_loss
from cluster.forecast.chances import HORIZONS_S, Chances
from cluster.forecast.table import Array

FADING = 0.99
"""Each batch of outcomes multiplies the weight of earlier ones of its horizon by this."""


class ForecastError:
    """Keeps exponentially weighted means of log loss and Brier score for each horizon."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(HORIZONS_S), 2))
        self._outcomes = np.zeros(len(HORIZONS_S))

    def add(self, horizon: int, chances: Array, came: Array) -> None:
        """Adds outcomes, bool[functions], of f32[functions] forecasts."""
        brier = (chances - came) ** 2
        self._sums[horizon] = self._sums[horizon] * FADING + (log_loss(chances, came).sum(), brier.sum())
        self._outcomes[horizon] = self._outcomes[horizon] * FADING + len(came)

    def means(self) -> dict[str, float]:
        """Returns the means by `log_loss_` or `brier_` and the name of a field of Chances."""
        means: dict[str, float] = {}
        for field, sums, outcomes in zip(Chances._fields, self._sums, self._outcomes, strict=True):
            if outcomes:
                means |= {f"log_loss_{field}": float(sums[0] / outcomes), f"brier_{field}": float(sums[1] / outcomes)}
        return means
