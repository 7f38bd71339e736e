"""SLO attainment of each tenant's calls, over sliding windows, on this gateway worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gateway.workers.sliding_sums import SlidingSums, Sums

WINDOWS = (60, 600, 3600)
"""Seconds."""
SLICE = 10
"""Seconds that are counted together: windows move in such steps."""
MAX_TENANTS = 1000
"""Counted at once; the one that called least recently is forgotten."""

Promise = Literal["ttft", "tpot", "all"]
PROMISES: tuple[Promise, ...] = ("ttft", "tpot", "all")


class Kept(Sums):
    """Calls that ended in some time: those that had an SLO, and those of them that attained it."""

    calls: int = 0
    ttft: int = 0
    tpot: int = 0
    all: int = 0
    held_ttft: int = 0
    held_tpot: int = 0
    held_all: int = 0

    def share(self, promise: Promise) -> float | None:
        """Returns the share of calls that got what they were promised; None where nothing was promised."""
        promised: int = getattr(self, promise)
        return float(getattr(self, f"held_{promise}") / promised) if promised else None


def judge(
    promised: tuple[float | None, float | None], measured: tuple[float | None, float | None], answered: bool
) -> dict[Promise, bool]:
    """Returns which promises (TTFT, TPOT; seconds) a call kept, and as `all` whether each; empty without promises.

    A call without an answer kept nothing. One that was answered by a single token has no TPOT to break.
    """
    outcome: dict[Promise, bool] = {}
    for name, limit, value in zip(PROMISES, promised, measured, strict=False):
        if limit is not None:
            late = value is not None and value > limit
            outcome[name] = answered and not late and (value is not None or name == "tpot")
    if outcome:
        outcome["all"] = all(outcome.values())
    return outcome


class Attainment(SlidingSums[Kept]):
    """Attainment by tenant, for each of WINDOWS. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        windows = tuple(seconds // SLICE for seconds in WINDOWS)
        super().__init__(clock, "attainment", Kept, seconds=SLICE, windows=windows, max_names=MAX_TENANTS)

    def record(self, tenant: str, outcome: dict[Promise, bool]) -> None:
        """Counts a call of the tenant that has ended. Nothing is kept of a tenant without an SLO."""
        if outcome:
            attained = {f"held_{promise}": int(is_attained) for promise, is_attained in outcome.items()}
            self.add(tenant, Kept(calls=1, **dict.fromkeys(outcome, 1), **attained))
