"""Forecast probabilities of calls, by function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cluster.forecast.table import Array

HORIZONS_S = (1.0, 5.0, 30.0, 300.0)
"""Horizons in seconds: a forecast is the probability of a call within each of them."""


class Chances(NamedTuple):
    """Calibrated probabilities (0 to 1) of at least one call within each of HORIZONS_S, ascending."""

    within_1_s: float
    within_5_s: float
    within_30_s: float
    within_300_s: float


class Likely(NamedTuple):
    """A function that is likely to be called soon."""

    key: str
    chance: float
    """Probability of a call within 30 s."""


class Forecasts(Mapping[str, Chances]):
    """Chances of all functions by key, stored as one array. Tens of thousands of tuples, created every 2 s, would cause
    garbage collections that block the event loop for too long."""

    def __init__(self, keys: list[str], chances: Array) -> None:
        """Creates the mapping from keys to `chances` f32[functions, horizons], in the same order."""
        self._keys, self._chances = keys, chances

    def __getitem__(self, key: str) -> Chances:
        return Chances._make(self._chances[self._rows[key]].tolist())

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def likeliest(self, min_chance: float, limit: int) -> list[Likely]:
        """Returns the functions whose probability of a call within 30 s is at least `min_chance`, likeliest first.
        Returns `limit` of them at most."""
        chances = self._chances[:, Chances._fields.index("within_30_s")]
        rows = np.flatnonzero(chances >= min_chance)
        rows = rows[np.argsort(-chances[rows], kind="stable")[:limit]]
        return [
            Likely(self._keys[row], chance) for row, chance in zip(rows.tolist(), chances[rows].tolist(), strict=True)
        ]

    @cached_property
    def _rows(self) -> dict[str, int]:
        """Row in `chances` of each key. Computed only when a single function is looked up, which is rare."""
        return {key: row for row, key in enumerate(self._keys)}
