"""How many of a tenant's calls kept its SLO, over sliding windows, on this gateway worker and those that tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from gateway.sliding_sums import SlidingSums

WINDOWS = (60, 600, 3600)
"""Seconds."""
SLICE = 10
"""Seconds that are counted together: windows move in such steps."""
MAX_TENANTS = 1000
"""Counted at once; the one that called least recently is forgotten."""

Promise = Literal["ttft", "tpot", "all"]
PROMISES: tuple[Promise, ...] = ("ttft", "tpot", "all")


@dataclass
class Kept:
    """Of the calls that ended in `seconds`: of how many something was promised, and of how many of these it held."""

    seconds: int = SLICE
    calls: int = 0
    promised: dict[Promise, int] = field(default_factory=dict)
    held: dict[Promise, int] = field(default_factory=dict)

    def share(self, promise: Promise) -> float | None:
        """None where nothing was promised."""
        promised = self.promised.get(promise, 0)
        return self.held.get(promise, 0) / promised if promised else None

    def note(self, outcome: dict[Promise, bool]) -> None:
        self.calls += 1
        for promise, held in outcome.items():
            self.promised[promise] = self.promised.get(promise, 0) + 1
            self.held[promise] = self.held.get(promise, 0) + held

    def add(self, other: Kept) -> None:
        self.calls += other.calls
        for mine, theirs in ((self.promised, other.promised), (self.held, other.held)):
            for promise, count in theirs.items():
                mine[promise] = mine.get(promise, 0) + count


def judge(
    promised: tuple[float | None, float | None], seen: tuple[float | None, float | None], answered: bool
) -> dict[Promise, bool]:
    """What of a promise (TTFT, TPOT; seconds) held in a call; empty when nothing was promised.

    A call without an answer kept nothing. One that was answered by a single token has no TPOT to break.
    """
    outcome: dict[Promise, bool] = {}
    for name, limit, value in zip(PROMISES, promised, seen, strict=False):
        if limit is not None:
            late = value is not None and value > limit
            outcome[name] = answered and not late and (value is not None or name == "tpot")
    if outcome:
        outcome["all"] = all(outcome.values())
    return outcome


Attained = tuple[str, list[Kept]]
"""A tenant, and what was kept of its promises in each window."""


class Attainment(SlidingSums[str, Kept]):
    """By tenant. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, Kept, seconds=SLICE, slices=WINDOWS[-1] // SLICE, most=MAX_TENANTS)

    def note(self, tenant: str, outcome: dict[Promise, bool]) -> None:
        """One call of the tenant has ended. Nothing is kept of a tenant to which nothing is promised."""
        if outcome:
            kept = Kept()
            kept.note(outcome)
            self.add(tenant, kept)

    def of(self, tenant: str) -> list[Kept]:
        """One per window."""
        sums = [Kept(seconds) for seconds in WINDOWS]
        for age, kept in self.within(tenant):
            for window in sums:
                if age < window.seconds // SLICE:
                    window.add(kept)
        return sums

    def all(self) -> Iterator[Attained]:
        """Of each tenant that is known."""
        return ((tenant, self.of(tenant)) for tenant in self.known())
