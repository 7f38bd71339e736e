"""What a forecast says of one function."""

from __future__ import annotations

from typing import NamedTuple

HORIZONS_S = (1.0, 5.0, 30.0, 300.0)
"""Seconds from now within which a call is forecast."""


class Chances(NamedTuple):
    """Calibrated probabilities (0 to 1) of at least one call within each of HORIZONS_S, ascending."""

    within_1_s: float
    within_5_s: float
    within_30_s: float
    within_300_s: float
