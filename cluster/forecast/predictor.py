"""Interface of the predictors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.table import Array

HORIZONS = np.array(HORIZONS_S)


@dataclass(frozen=True)
class Second:
    """The calls of one second."""

    now: float
    """End of the second, by a clock that never goes back."""
    elapsed: float
    """Seconds since the end of the second observed before; more than 1 if some were missed."""
    unix: float
    """End of the second, as the host's clock reports it."""
    rows: Array
    """i64: the functions that were called, by their rows in the table."""
    counts: Array
    """f32: how often."""
    idle: Array
    """f64: seconds since the second with their call before; infinite for a function that was not in the table."""


class Predictor(Protocol):
    """Estimates the chances of calls. Its state is in columns of the forecaster's table, and what it learned of all
    functions together."""

    def observe(self, second: Second) -> None: ...

    def chances(self, now: float) -> Array:
        """Returns f32[functions, horizons]: estimates of the probability of a call, 0 to 1, not yet calibrated."""
        ...


def chances_of_rate(rate: Array) -> Array:
    """Returns the chances, f32[functions, horizons], of calls that come by Poisson's law, at f32[functions] calls per
    second."""
    chances: Array = -np.expm1(-rate[:, None] * HORIZONS.astype(np.float32))
    return chances
