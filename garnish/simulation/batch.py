"""The batch of a simulated node: its ranks and adapters, and runs of decode steps while the batch does not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

from cluster.performance_model import RankTerm, counted_rank

ROUNDING = 1e-9
"""Tolerance in seconds for the end of a step, which is computed as a sum of floats."""


class RankMix:
    """Counts of ranks and adapters in a changing set of requests. Sums are updated with each change."""

    __slots__ = ("adapter_ranks", "adapters", "padded_rank", "ranks", "request_ranks", "rows")

    def __init__(self, padded_rank: int) -> None:
        """`padded_rank`: that of the node's model of decode steps."""
        self.padded_rank = padded_rank
        self.rows = 0
        self.request_ranks = 0
        self.adapter_ranks = 0
        self.ranks: dict[int, int] = {}
        self.adapters: dict[str, int] = {}

    def add(self, digest: str | None, rank: int) -> None:
        rank = counted_rank(rank, self.padded_rank)
        self.rows += 1
        self.request_ranks += rank
        self.ranks[rank] = self.ranks.get(rank, 0) + 1
        if digest is not None:
            before = self.adapters.get(digest, 0)
            self.adapters[digest] = before + 1
            if not before:
                self.adapter_ranks += rank

    def remove(self, digest: str | None, rank: int) -> None:
        rank = counted_rank(rank, self.padded_rank)
        self.rows -= 1
        self.request_ranks -= rank
        if self.ranks[rank] == 1:
            del self.ranks[rank]
        else:
            self.ranks[rank] -= 1
        if digest is not None:
            if self.adapters[digest] == 1:
                del self.adapters[digest]
                self.adapter_ranks -= rank
            else:
                self.adapters[digest] -= 1

    @property
    def max_rank(self) -> int:
        return max(self.ranks, default=0)


RANK_TERM: dict[RankTerm, Callable[[RankMix], int]] = {
    "max_rank": lambda mix: mix.rows * mix.max_rank,
    "request_ranks": lambda mix: mix.request_ranks,
    "adapter_ranks": lambda mix: mix.adapter_ranks,
}


@dataclass(slots=True)
class DecodeRun:
    """Decode steps of a batch that does not change, computed in closed form.

    Each context grows by one token per step, so the duration of steps grows linearly. Step i (from 0) takes
    first + i * growth seconds, and k steps take k * first + growth * k * (k - 1) / 2 seconds.
    """

    begin: float
    first: float
    """duration of the first step in seconds; above 0"""
    growth: float
    """seconds by which each step is longer than the previous one; at most twice `first`"""
    steps: int

    def seconds(self, steps: int) -> float:
        return steps * (self.first + self.growth * (steps - 1) / 2)

    @property
    def end(self) -> float:
        return self.begin + self.seconds(self.steps)

    def done_by(self, now: float) -> int:
        """Returns the number of steps that have ended by `now`."""
        return min(self.steps, int(self._passed(now + ROUNDING)))

    def cut(self, now: float) -> None:
        """Shortens the run so that no step starts after `now`."""
        self.steps = min(self.steps, max(1, ceil(self._passed(now - ROUNDING))))

    def _passed(self, now: float) -> float:
        """Returns the fractional number of steps that have passed by `now`: the k for which k steps take `now` -
        `begin`."""
        passed = max(0.0, now - self.begin)
        half = self.first - self.growth / 2
        return 2 * passed / (half + sqrt(half * half + 2 * self.growth * passed)) if passed else 0.0
