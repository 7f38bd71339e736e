"""Calibration of forecasts, so that they are probabilities: of all forecasts of 0.3, three in ten come true. Also
measures forecast errors."""

from __future__ import annotations

import numpy as np

from cluster.forecast.chances import HORIZONS_S, Chances
from cluster.forecast.table import Array

FARTHEST, STEP = 8.0, 0.5
"""Range (-FARTHEST to FARTHEST) and spacing of the bins of log-odds."""
BINS = round(2 * FARTHEST / STEP) + 1
ALL = slice(None)
ERROR_FADING = 0.99
"""Factor by which each batch of outcomes multiplies the weight of earlier ones in a horizon's mean errors."""
PRIOR_WEIGHT = 10.0
"""Number of prior outcomes in each bin; their frequency matches the bin's log-odds."""


def log_odds(chances: Array) -> Array:
    """Returns the log-odds of probabilities as f32 of the same shape, clipped to -FARTHEST to FARTHEST."""
    lowest = 1 / (1 + np.exp(FARTHEST))
    clipped = np.clip(chances, lowest, 1 - lowest)
    odds: Array = np.log(clipped / (1 - clipped)).astype(np.float32)
    return np.clip(odds, -FARTHEST, FARTHEST)


def log_loss(chances: Array, outcomes: Array) -> Array:
    """Returns the log loss of forecasts, in nats, in the shape of `chances`. `chances` f32[functions, ...] are forecast
    probabilities; `outcomes` bool[functions] is whether a call came."""
    outcomes = outcomes.reshape(-1, *(1,) * (chances.ndim - 1))
    loss: Array = -np.log(np.maximum(np.where(outcomes, chances, 1 - chances), np.float32(1e-7)))
    return loss


class Calibration:
    """Counts of how often calls came after forecasts of each log-odds, by predictor and horizon. An outcome is split
    between the two nearest bins, in proportion to nearness. Between bins the frequency is interpolated linearly."""

    def __init__(self, horizons: int, predictors: int) -> None:
        centres = np.linspace(-FARTHEST, FARTHEST, BINS)
        self._expected = PRIOR_WEIGHT / (1 + np.exp(-centres))
        self._calls = np.zeros((horizons, predictors, BINS))
        self._all = np.zeros((horizons, predictors, BINS))

    def chances(self, odds: Array, horizon: int | slice = ALL, predictors: slice = ALL) -> Array:
        """Returns calibrated probabilities in the shape of `odds`. `odds` is f32[functions, horizons, predictors], or
        f32[functions, predictors] for one horizon. `predictors` selects the predictors whose log-odds these are."""
        calls, total = (counted[horizon, ..., predictors, :] for counted in (self._calls, self._all))
        rate = ((calls + self._expected) / (total + PRIOR_WEIGHT)).astype(np.float32)
        cell, part = _place(odds)
        lines = np.arange(rate[..., 0].size).reshape(rate.shape[:-1]) * BINS
        flat, at = rate.ravel(), lines + cell
        chances: Array = flat[at] * (1 - part) + flat[at + 1] * part
        return chances

    def learn(self, horizon: int, odds: Array, outcomes: Array, fading: float) -> None:
        """Adds outcomes of forecasts to the counts of one horizon. `horizon` is an index into HORIZONS_S. `odds`
        f32[functions, predictors] are the forecasts; `outcomes` bool[functions] is whether a call came. Earlier counts
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
    """Exponentially weighted means of log loss and Brier score for each horizon."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(HORIZONS_S), 2))
        self._outcomes = np.zeros(len(HORIZONS_S))

    def add(self, horizon: int, chances: Array, outcomes: Array) -> None:
        """Adds forecasts and their outcomes to the means of one horizon. `horizon` is an index into HORIZONS_S.
        `chances` is f32[functions]; `outcomes` bool[functions] is whether a call came."""
        brier = (chances - outcomes) ** 2
        self._sums[horizon] = self._sums[horizon] * ERROR_FADING + (log_loss(chances, outcomes).sum(), brier.sum())
        self._outcomes[horizon] = self._outcomes[horizon] * ERROR_FADING + len(outcomes)

    def means(self) -> dict[str, float]:
        """Returns the means by name: `log_loss_` or `brier_`, followed by a field name of Chances."""
        means: dict[str, float] = {}
        for field, sums, outcomes in zip(Chances._fields, self._sums, self._outcomes, strict=True):
            if outcomes:
                means |= {f"log_loss_{field}": float(sums[0] / outcomes), f"brier_{field}": float(sums[1] / outcomes)}
        return means


def _place(odds: Array) -> tuple[Array, Array]:
    """Returns the index of the bin below each log-odds, and its relative distance (0 to 1) towards the next bin."""
    place = (odds + np.float32(FARTHEST)) / np.float32(STEP)
    cell = np.clip(place.astype(np.int64), 0, BINS - 2)
    return cell, place - cell.astype(np.float32)
