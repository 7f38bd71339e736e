"""Decode steps of a batch that does not change, in closed form: contexts grow by a token a row, so steps grow evenly.

Step i takes first + i * growth seconds, and k steps take k * first + growth * k * (k - 1) / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

ROUNDING = 1e-9
"""Seconds by which sums of floats may miss a step's end."""


@dataclass(slots=True)
class DecodeRun:
    begin: float
    first: float
    """seconds of the first step; above 0"""
    growth: float
    """seconds by which each step is longer than the one before; at most twice `first`"""
    steps: int

    def seconds(self, steps: int) -> float:
        return steps * (self.first + self.growth * (steps - 1) / 2)

    @property
    def end(self) -> float:
        return self.begin + self.seconds(self.steps)

    def done_by(self, now: float) -> int:
        """Returns how many steps have ended by `now`."""
        return min(self.steps, int(self._passed(now + ROUNDING)))

    def cut(self, now: float) -> None:
        """Shortens the run so that no step begins after `now`: the one that runs is the last."""
        self.steps = min(self.steps, max(1, ceil(self._passed(now - ROUNDING))))

    def _passed(self, now: float) -> float:
        """Returns the steps, with their fractions, that fit into the time until `now`: the root of seconds(k) = now -
        begin."""
        passed = max(0.0, now - self.begin)
        half = self.first - self.growth / 2
        return 2 * passed / (half + sqrt(half * half + 2 * self.growth * passed)) if passed else 0.0
