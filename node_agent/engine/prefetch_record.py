"""Outcome of predicted prefetches: bytes that were of use, late or wasted; and how far prefetching backs off."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 120.0
"""Seconds after which a byte counts half in the share of waste."""
MAX_AT_ONCE = 2
HELD_BACK_CHANCE = 0.5
"""Least chance of a want that is followed where waste is just above its bound."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of the predicted prefetches that may begin."""

    at_once: int = MAX_AT_ONCE
    min_chance: float = 0.0


class PrefetchRecord:
    """Sums since the engine's start, and the same lately: each byte's weight halves in HALF_LIFE_S."""

    def __init__(self, waste: float, leeway: int) -> None:
        """`waste`: share of the bytes lately, 0 to 1, above which prefetching backs off. `leeway`: bytes that count as
        of use from the start, and do not fade: a first mistake changes nothing, and without new waste the share falls
        until prefetching resumes."""
        self.useful_bytes, self.late_bytes, self.wasted_bytes = 0, 0, 0
        self._max_waste, self._leeway = waste, leeway
        self._lately, self._wasted_lately = 0.0, 0.0
        self._at = 0.0

    def count_bytes(self, now: float, *, useful: float = 0.0, late: float = 0.0, wasted: float = 0.0) -> None:
        """Notes bytes whose use is decided at `now` (monotonic seconds)."""
        self.useful_bytes += round(useful)
        self.late_bytes += round(late)
        self.wasted_bytes += round(wasted)
        self._fade(now)
        self._lately += useful + late + wasted
        self._wasted_lately += wasted

    def wasted_share(self, now: float) -> float:
        self._fade(now)
        return self._wasted_lately / max(1.0, self._lately + self._leeway)

    def bounds(self, now: float) -> Bounds:
        """Returns the bounds for new prefetches. Above the bound of waste it is one at a time, and only for a chance
        that rises with the waste, up to certainty."""
        over = self.wasted_share(now) - self._max_waste
        if over <= 0:
            return Bounds()
        return Bounds(1, HELD_BACK_CHANCE + (1 - HELD_BACK_CHANCE) * over / (1 - self._max_waste))

    def _fade(self, now: float) -> None:
        share = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        self._lately *= share
        self._wasted_lately *= share
        self._at = max(self._at, now)
