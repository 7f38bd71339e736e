"""Ratios of paired measurements: what one way took over what another took for the same work, with an interval."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000
SHARES = (2.5, 97.5)


@dataclass(frozen=True)
class PairedRatio:
    """A geometric mean of ratios and their median, each with a 95 % interval by a bootstrap over the pairs."""

    mean: float
    lower: float
    upper: float
    pairs: int
    median: float
    median_lower: float
    median_upper: float


def paired_ratio(ours: Mapping[Hashable, float], theirs: Mapping[Hashable, float], seed: int) -> PairedRatio | None:
    """Returns ours over theirs, over the keys that both have; None if there are none.

    Both have positive values. The bootstrap draws as many pairs as there are, with replacement, RESAMPLES times.
    """
    keys = [key for key in ours if key in theirs]
    if not keys:
        return None
    logs = np.log([ours[key] / theirs[key] for key in keys])
    drawn = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLES, len(logs)))
    mean = (float(np.exp(logs.mean())), *_interval(logs[drawn].mean(axis=1)))
    middle = (float(np.exp(np.median(logs))), *_interval(np.median(logs[drawn], axis=1)))
    return PairedRatio(*mean, len(logs), *middle)


@dataclass(frozen=True)
class PairedDifference:
    """Median of differences, with a 95 % interval by a bootstrap over the pairs."""

    median: float
    lower: float
    upper: float


def paired_difference(
    ours: Mapping[Hashable, float], theirs: Mapping[Hashable, float], seed: int
) -> PairedDifference | None:
    """Returns ours less theirs, over the keys that both have; None if there are none."""
    keys = [key for key in ours if key in theirs]
    if not keys:
        return None
    differences = np.array([ours[key] - theirs[key] for key in keys])
    drawn = np.random.default_rng(seed).integers(len(differences), size=(RESAMPLES, len(differences)))
    lower, upper = np.percentile(np.median(differences[drawn], axis=1), SHARES)
    return PairedDifference(float(np.median(differences)), float(lower), float(upper))


def _interval(logs: np.ndarray) -> tuple[float, float]:
    lower, upper = np.exp(np.percentile(logs, SHARES))
    return float(lower), float(upper)
