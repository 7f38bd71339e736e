"""Record of predicted prefetches: how many of their bytes were useful, late or wasted, and how far prefetching is
slowed down therefore."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 120.0
"""Half-life in seconds of a byte's weight in the wasted share."""
MAX_AT_ONCE = 2
HELD_BACK_CHANCE = 0.5
"""Minimum call probability for which an adapter is prefetched when the wasted share is just above its limit."""


@dataclass(frozen=True)
class Bounds:
    """Limits on new predicted prefetches."""

    at_once: int = MAX_AT_ONCE
    min_chance: float = 0.0


class PrefetchRecord:
    """Bytes of predicted prefetches by outcome: totals since the engine's start, and recent ones that decay with
    HALF_LIFE_S."""

    def __init__(self, waste: float, leeway: int) -> None:
        """`waste`: recent wasted share, 0 to 1, above which prefetching slows down. `leeway`: bytes that always count
        as useful, so that a first mistake has no effect and prefetching resumes without new waste."""
        self.useful_bytes, self.late_bytes, self.wasted_bytes = 0, 0, 0
        self._max_waste, self._leeway = waste, leeway
        self._lately, self._wasted_lately = 0.0, 0.0
        self._at = 0.0

    def count_bytes(self, now: float, *, useful: float = 0.0, late: float = 0.0, wasted: float = 0.0) -> None:
        """Adds bytes whose outcome was decided at `now` (monotonic seconds)."""
        self.useful_bytes += round(useful)
        self.late_bytes += round(late)
        self.wasted_bytes += round(wasted)
        self._fade(now)
        self._lately += useful + late + wasted
        self._wasted_lately += wasted

    def wasted_share(self, now: float) -> float:
        """Returns the share, 0 to 1, of recent bytes that were wasted."""
        self._fade(now)
        return self._wasted_lately / max(1.0, self._lately + self._leeway)

    def bounds(self, now: float) -> Bounds:
        """Returns the limits for new prefetches. Above the allowed waste only one may run at a time. The minimum call
        probability then rises with the waste, up to 1."""
        over = self.wasted_share(now) - self._max_waste
        if over <= 0:
            return Bounds()
        return Bounds(1, HELD_BACK_CHANCE + (1 - HELD_BACK_CHANCE) * over / (1 - self._max_waste))

    def _fade(self, now: float) -> None:
        share = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        self._lately *= share
        self._wasted_lately *= share
        self._at = max(self._at, now)
