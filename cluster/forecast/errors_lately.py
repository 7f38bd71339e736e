"""How wrong the forecasts were lately."""

from __future__ import annotations

import numpy as np

from cluster.forecast.calibration import log_loss
from cluster.forecast.chances import HORIZONS_S, Chances
from cluster.forecast.table import Array

FADING = 0.99
"""What a lot of outcomes keeps of its weight with every later one of its horizon."""


class ErrorsLately:
    """Faded means of log loss and Brier score, of each horizon."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(HORIZONS_S), 2))
        self._outcomes = np.zeros(len(HORIZONS_S))

    def add(self, horizon: int, chances: Array, came: Array) -> None:
        """Takes outcomes, bool[functions], of f32[functions]."""
        brier = (chances - came) ** 2
        self._sums[horizon] = self._sums[horizon] * FADING + (log_loss(chances, came).sum(), brier.sum())
        self._outcomes[horizon] = self._outcomes[horizon] * FADING + len(came)

    def lately(self) -> dict[str, float]:
        """`log_loss_` and `brier_` with the name of a field of Chances."""
        found: dict[str, float] = {}
        for field, sums, outcomes in zip(Chances._fields, self._sums, self._outcomes, strict=True):
            if outcomes:
                found |= {f"log_loss_{field}": float(sums[0] / outcomes), f"brier_{field}": float(sums[1] / outcomes)}
        return found
