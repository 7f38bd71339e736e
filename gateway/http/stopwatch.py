"""Seconds that the steps of one request took, for Server-Timing."""

from __future__ import annotations

from time import monotonic


class Stopwatch:
    def __init__(self) -> None:
        self.received = monotonic()
        self.steps: dict[str, float] = {}
        self._last = self.received

    def lap(self, step: str) -> None:
        """Notes for `step` the seconds since the lap before."""
        now = monotonic()
        self.steps[step] = now - self._last
        self._last = now
