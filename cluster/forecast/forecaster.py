"""Forecaster of the functions that will be called soon, updated every second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import compress

import numpy as np

from cluster.forecast.calibration import ALL, Calibration, ForecastError, log_odds
from cluster.forecast.chances import HORIZONS_S, Forecasts
from cluster.forecast.idle_times import IdleTimes
from cluster.forecast.lstm import Lstm
from cluster.forecast.outcomes import Outcomes
from cluster.forecast.predictor import Predictor, Second
from cluster.forecast.recent_rate import Ewma, LastWindow
from cluster.forecast.seasonal import Seasonal
from cluster.forecast.table import Array, FunctionTable
from cluster.forecast.weights import Weights

Maker = Callable[[FunctionTable], Predictor]
PARTS: dict[str, Maker] = {
    "last_window": LastWindow,
    "ewma": Ewma,
    "seasonal": Seasonal,
    "histogram": IdleTimes,
}
PREDICTORS: dict[str, Maker] = PARTS | {"lstm": Lstm}
"""All predictors, by name. The LSTM is not part of the mixture: it takes nearly as long as all others together and does
not improve it (docs/results/forecast.md)."""
DEFAULT = "mix"
"""Name of the default predictor: a mixture of all PARTS, each weighted by its recent accuracy."""
MAX_FUNCTIONS = 40_000
"""Maximum number of functions in the table; beyond it the least recently called ones are dropped."""
ACTIVE_S = 1800.0
"""Seconds after its last call for which a function is forecast. The function then stays in the table for the longest
horizon, so that the absence of calls is learned as well."""
FADING = 0.9998
"""Factor by which each batch of outcomes multiplies the earlier counts of the calibration."""


class Forecaster:
    """Forecasts calls, and learns from the calls of every second. Not thread-safe."""

    def __init__(self, predictor: str = DEFAULT, *, mixed: Mapping[str, Maker] = PARTS) -> None:
        """Creates a forecaster with this `predictor`. `mixed`: parts of the default mixture. Raises ValueError, which
        lists the known predictors, for an unknown one."""
        if predictor != DEFAULT and predictor not in PREDICTORS:
            raise ValueError(f"unknown predictor {predictor!r}; known are {', '.join((DEFAULT, *PREDICTORS))}")
        makers = mixed if predictor == DEFAULT else {predictor: PREDICTORS[predictor]}
        self._table = FunctionTable(MAX_FUNCTIONS, ACTIVE_S + HORIZONS_S[-1] + 1)
        self.parts = tuple(makers)
        self._predictors = [make(self._table) for make in makers.values()]
        size = len(self.parts)
        self._outcomes = Outcomes(self._table, size + 1)
        self._weights = Weights(self._table, len(HORIZONS_S), size)
        self._calibration = Calibration(len(HORIZONS_S), size + 1)
        """Calibration of all parts and, as the last predictor, of their mixture."""
        self._errors = ForecastError()
        self._odds: tuple[float, Array] = -np.inf, np.zeros((0, len(HORIZONS_S), size + 1), np.float32)
        """Uncalibrated log-odds f32[functions, horizons, parts and their mixture], preceded by the time at which they
        were computed."""
        self._unix: float | None = None
        self._now = 0.0
        """Seconds of a clock that never goes back."""
        self._observed_at: float | None = None

    def observe(self, now: float, counts: Mapping[str, int]) -> None:
        """Learns from the number of calls per function key during the second that ends at `now`, in Unix seconds.

        Seconds may be skipped, and the clock may go back.
        """
        self._advance(now)
        elapsed = 1.0 if self._observed_at is None else self._now - self._observed_at
        self._observed_at = self._now
        self._table.expire(self._now)
        called = {key: count for key, count in counts.items() if count > 0}
        rows, idle = self._table.record(list(called), self._now)
        calls = np.fromiter(called.values(), np.float32, len(called))[: len(rows)]
        self._learn()
        second = Second(self._now, elapsed, now, rows, calls, idle)
        for predictor in self._predictors:
            predictor.observe(second)
        odds = self._compute_odds()
        self._outcomes.record(self._now, np.where(self._active()[:, None, None], odds, np.nan))

    def forecast(self, now: float) -> Forecasts:
        """Returns the chances of every function that was called in the last 30 minutes. `now` is in Unix seconds.
        Uncalibrated forecasts are reused for up to a second."""
        keys, chances = self.forecast_parts(now, slice(-1, None))
        return Forecasts(keys, np.maximum.accumulate(chances[:, :, 0], axis=1))

    def forecast_parts(self, now: float, predictors: slice = ALL) -> tuple[list[str], Array]:
        """Returns the functions' keys and their calibrated chances f32[functions, horizons, predictors]. `predictors`
        selects among the parts and, as the last one, their mixture."""
        self._advance(now)
        active = self._active()
        odds = self._odds[1] if self._now - self._odds[0] < 1.0 else self._compute_odds()
        chances = self._calibration.chances(odds[active][:, :, predictors], ALL, predictors)
        return list(compress(self._table.keys, active.tolist())), chances

    def error(self) -> dict[str, float]:
        """Returns log loss and Brier score of recent forecasts by name: `log_loss_` or `brier_`, followed by a field
        name of Chances. Horizons without outcomes are left out."""
        return self._errors.means()

    def _advance(self, unix: float) -> None:
        if self._unix is not None:
            self._now += max(0.0, unix - self._unix)
        self._unix = unix

    def _active(self) -> Array:
        """Returns bool[functions]: whether each function was called in the last 30 minutes."""
        active: Array = self._table.last_call.live >= self._now - ACTIVE_S
        return active

    def _compute_odds(self) -> Array:
        """Computes, stores and returns the log-odds f32[functions, horizons, parts and their mixture], not yet
        calibrated."""
        odds = log_odds(np.stack([predictor.chances(self._now) for predictor in self._predictors], axis=2))
        mixture = self._weights.mix(self._calibration.chances(odds, ALL, slice(len(self.parts))))
        self._odds = self._now, np.concatenate([odds, log_odds(mixture)[:, :, None]], axis=2)
        return self._odds[1]

    def _learn(self) -> None:
        for horizon, rows, odds, came_true in self._outcomes.resolve_due(self._now):
            chances = self._calibration.chances(odds, horizon)
            self._errors.add(horizon, chances[:, -1], came_true)
            self._weights.learn(horizon, rows, chances[:, :-1], came_true)
            self._calibration.learn(horizon, odds, came_true, FADING)
