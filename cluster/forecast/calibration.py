"""Calibration makes forecasts probabilities: of all forecasts of 0.3, three in ten come true. Measures their error."""

from __future__ import annotations

import numpy as np

from cluster.forecast.chances import HORIZONS_S, Chances
from cluster.forecast.table import Array

FARTHEST, STEP = 8.0, 0.5
"""Log-odds from -FARTHEST to FARTHEST are counted in bins, one at every STEP."""
BINS = round(2 * FARTHEST / STEP) + 1
ALL = slice(None)
ERROR_FADING = 0.99
"""Each batch of outcomes multiplies the weight of earlier ones in the mean errors of its horizon by this."""
PRIOR_WEIGHT = 10.0
"""Outcomes with which each bin starts; they agree with its log-odds."""


def log_odds(chances: Array) -> Array:
    """Returns the log-odds of probabilities, f32, within FARTHEST of 0."""
    lowest = 1 / (1 + np.exp(FARTHEST))
    clipped = np.clip(chances, lowest, 1 - lowest)
    odds: Array = np.log(clipped / (1 - clipped)).astype(np.float32)
    return np.clip(odds, -FARTHEST, FARTHEST)


def log_loss(chances: Array, outcomes: Array) -> Array:
    """Returns -ln of the probability that f32[functions, ...] chances gave to what happened, bool[functions]."""
    outcomes = outcomes.reshape(-1, *(1,) * (chances.ndim - 1))
    loss: Array = -np.log(np.maximum(np.where(outcomes, chances, 1 - chances), np.float32(1e-7)))
    return loss


class Calibration:
    """Counts how often calls came after each log-odds, for several predictors and horizons. An outcome counts in the
    two nearest bins, by nearness; between bins the frequency is linear."""

    def __init__(self, horizons: int, predictors: int) -> None:
        centres = np.linspace(-FARTHEST, FARTHEST, BINS)
        self._expected = PRIOR_WEIGHT / (1 + np.exp(-centres))
        self._calls = np.zeros((horizons, predictors, BINS))
        self._all = np.zeros((horizons, predictors, BINS))

    def chances(self, odds: Array, horizon: int | slice = ALL, predictors: slice = ALL) -> Array:
        """Returns probabilities f32[functions, horizons, predictors] for log-odds of that shape, or f32[functions,
        predictors] for one horizon. The log-odds are those of `predictors`."""
        calls, total = (counted[horizon, ..., predictors, :] for counted in (self._calls, self._all))
        rate = ((calls + self._expected) / (total + PRIOR_WEIGHT)).astype(np.float32)
        cell, part = _place(odds)
        lines = np.arange(rate[..., 0].size).reshape(rate.shape[:-1]) * BINS
        flat, at = rate.ravel(), lines + cell
        chances: Array = flat[at] * (1 - part) + flat[at + 1] * part
        return chances

    def learn(self, horizon: int, odds: Array, outcomes: Array, fading: float) -> None:
        """Counts outcomes, bool[functions], of forecasts that had f32[functions, predictors] log-odds. Earlier counts
        are multiplied by `fading`."""
        cell, part = _place(odds)
        at = (cell + np.arange(odds.shape[1]) * BINS).ravel()
        shape = self._all.shape[1:]
        for counted, into in (
            (np.ones_like(part), self._all),
            (np.repeat(outcomes[:, None], odds.shape[1], 1), self._calls),
        ):
            low = np.bincount(at, ((1 - part) * counted).ravel(), shape[0] * BINS)
            high = np.bincount(at + 1, (part * counted).ravel(), shape[0] * BINS)
            into[horizon] = into[horizon] * fading + (low + high).reshape(shape)


class ForecastError:
    """Keeps exponentially weighted means of log loss and Brier score for each horizon."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(HORIZONS_S), 2))
        self._outcomes = np.zeros(len(HORIZONS_S))

    def add(self, horizon: int, chances: Array, outcomes: Array) -> None:
        """Adds outcomes, bool[functions], of f32[functions] forecasts."""
        brier = (chances - outcomes) ** 2
        self._sums[horizon] = self._sums[horizon] * ERROR_FADING + (log_loss(chances, outcomes).sum(), brier.sum())
        self._outcomes[horizon] = self._outcomes[horizon] * ERROR_FADING + len(outcomes)

    def means(self) -> dict[str, float]:
        """Returns the means by `log_loss_` or `brier_` and the name of a field of Chances."""
        means: dict[str, float] = {}
        for field, sums, outcomes in zip(Chances._fields, self._sums, self._outcomes, strict=True):
            if outcomes:
                means |= {f"log_loss_{field}": float(sums[0] / outcomes), f"brier_{field}": float(sums[1] / outcomes)}
        return means


def _place(odds: Array) -> tuple[Array, Array]:
    """Returns the bin below each log-odds, and how far it is to the next, 0 to 1."""
    place = (odds + np.float32(FARTHEST)) / np.float32(STEP)
    cell = np.clip(place.astype(np.int64), 0, BINS - 2)
    return cell, place - cell.astype(np.float32)
