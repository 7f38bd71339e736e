"""Probabilities that hold: of the times when 0.3 was said, three in ten came true."""

from __future__ import annotations

import numpy as np

from cluster.forecast.table import Array

FARTHEST, STEP = 8.0, 0.5
"""Log-odds are told apart from -FARTHEST to FARTHEST, in bins at every STEP."""
BINS = round(2 * FARTHEST / STEP) + 1
ALL = slice(None)
PRIOR_WEIGHT = 10.0
"""Outcomes that a bin's own log-odds count as."""


def log_odds(chances: Array) -> Array:
    """f32, within FARTHEST of 0."""
    least = 1 / (1 + np.exp(FARTHEST))
    clipped = np.clip(chances, least, 1 - least)
    odds: Array = np.log(clipped / (1 - clipped)).astype(np.float32)
    return np.clip(odds, -FARTHEST, FARTHEST)


def log_loss(chances: Array, came: Array) -> Array:
    """-ln of the probability that was given to what happened: f32[functions, ...] and bool[functions]."""
    came = came.reshape(-1, *(1,) * (chances.ndim - 1))
    loss: Array = -np.log(np.maximum(np.where(came, chances, 1 - chances), np.float32(1e-7)))
    return loss


class Calibration:
    """How often calls came after each log-odds, of several predictors and horizons, lately. An outcome counts in the
    two nearest bins, by nearness; between bins the frequency is linear."""

    def __init__(self, horizons: int, predictors: int) -> None:
        centres = np.linspace(-FARTHEST, FARTHEST, BINS)
        self._expected = PRIOR_WEIGHT / (1 + np.exp(-centres))
        self._came = np.zeros((horizons, predictors, BINS))
        self._all = np.zeros((horizons, predictors, BINS))

    def chances(self, odds: Array, horizon: int | slice = ALL, predictors: slice = ALL) -> Array:
        """f32[functions, horizons, predictors] from log-odds of that shape, or f32[functions, predictors] of one
        horizon. They are those of the `predictors`."""
        came, total = (counted[horizon, ..., predictors, :] for counted in (self._came, self._all))
        rate = ((came + self._expected) / (total + PRIOR_WEIGHT)).astype(np.float32)
        cell, part = _place(odds)
        lines = np.arange(rate[..., 0].size).reshape(rate.shape[:-1]) * BINS
        flat, at = rate.ravel(), lines + cell
        found: Array = flat[at] * (1 - part) + flat[at + 1] * part
        return found

    def learn(self, horizon: int, odds: Array, came: Array, fading: float) -> None:
        """Takes outcomes, bool[functions], of what had f32[functions, predictors] log-odds. What was known before is
        multiplied by `fading`."""
        cell, part = _place(odds)
        at = (cell + np.arange(odds.shape[1]) * BINS).ravel()
        shape = self._all.shape[1:]
        for counted, into in (
            (np.ones_like(part), self._all),
            (np.repeat(came[:, None], odds.shape[1], 1), self._came),
        ):
            low = np.bincount(at, ((1 - part) * counted).ravel(), shape[0] * BINS)
            high = np.bincount(at + 1, (part * counted).ravel(), shape[0] * BINS)
            into[horizon] = into[horizon] * fading + (low + high).reshape(shape)


def _place(odds: Array) -> tuple[Array, Array]:
    """The bin below each log-odds, and how far it is to the next, 0 to 1."""
    place = (odds + np.float32(FARTHEST)) / np.float32(STEP)
    cell = np.clip(place.astype(np.int64), 0, BINS - 2)
    return cell, place - cell.astype(np.float32)
