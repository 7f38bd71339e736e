"""Repeats of measured cases: their order, and how a measurement ends early."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Case = TypeVar("Case")

Progress = Callable[[str, float], None]
"""Callback with the name of the current step and its finished share, 0 to 1."""


class SweepTooSlow(RuntimeError):
    """Raised when too few cases could be measured within the time limit."""


class GaveWay(Exception):
    """Internal exception: a measured pass was ended early because the engine has other work."""


def passes(cases: Sequence[Case], rounds: int) -> list[Case]:
    """Returns each case once per round, in a different order in each round."""
    ordered: list[Case] = []
    for number in range(rounds):
        ordered += random.Random(number).sample(cases, len(cases))
    return ordered
