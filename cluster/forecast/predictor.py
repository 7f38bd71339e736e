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
    """Calls of all functions during one second."""

    now: float
    """Time at which the second ends, in seconds of a clock that never goes back."""
    elapsed: float
    """Seconds since the end of the previously observed second; more than 1 if some were skipped."""
    unix: float
    """Time at which the second ends, in Unix seconds by the host's clock."""
    rows: Array
    """Rows in the table of the called functions, i64[called]."""
    counts: Array
    """Number of calls of each of these functions, f32[called]."""
    idle: Array
    """Seconds since the second of each function's previous call, f64[called]; infinite for a function that was not in
    the table."""


class Predictor(Protocol):
    """Interface of a predictor: it estimates the chances of calls. Its state is in columns of the forecaster's table,
    and in what it has learned about all functions together."""

    def observe(self, second: Second) -> None: ...

    def chances(self, now: float) -> Array:
        """Returns estimated probabilities (0 to 1) of a call, f32[functions, horizons], not yet calibrated."""
        ...


def chances_of_rate(rate: Array) -> Array:
    """Returns the chances f32[functions, horizons] of Poisson-distributed calls. `rate` f32[functions] is in calls per
    second."""
    chances: Array = -np.expm1(-rate[:, None] * HORIZONS.astype(np.float32))
    return chances
