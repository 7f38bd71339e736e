"""Durations of one request's steps, for Server-Timing."""

from __future__ import annotations

from time import monotonic


class Stopwatch:
    def __init__(self) -> None:
        self.received = monotonic()
        self.steps: dict[str, float] = {}
        self._last = self.received

    def lap(self, step: str) -> None:
        """Records the seconds since the last lap as the duration of `step`."""
        now = monotonic()
        self.steps[step] = now - self._last
        self._last = now
