"""SLO attainment of each tenant's calls over sliding windows, counted by this gateway worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from gateway.workers.sliding_sums import SlidingSums, Sums

WINDOWS_S = (60, 600, 3600)
SLICE_S = 10
MAX_TENANTS = 1000

Promise = Literal["ttft", "tpot", "all"]
PROMISES: tuple[Promise, ...] = ("ttft", "tpot", "all")


class PromiseCounts(Sums):
    """Counts of completed calls with an SLO. `ttft`, `tpot` and `all` count calls with this target, and `held_...`
    those that attained it."""

    calls: int = 0
    ttft: int = 0
    tpot: int = 0
    all: int = 0
    held_ttft: int = 0
    held_tpot: int = 0
    held_all: int = 0

    def share(self, promise: Promise) -> float | None:
        """Returns the fraction of calls that attained the target; None if no call had it."""
        promised: int = getattr(self, promise)
        return float(getattr(self, f"held_{promise}") / promised) if promised else None


def judge(
    promised: tuple[float | None, float | None], measured: tuple[float | None, float | None], answered: bool
) -> dict[Promise, bool]:
    """Returns whether a call attained each of its targets (TTFT and TPOT in seconds), and all of them as `all`.

    The result is empty without targets. A call without an answer attained nothing. An answer of one token has no TPOT,
    so it attains that target.
    """
    outcome: dict[Promise, bool] = {}
    for name, limit, value in zip(PROMISES, promised, measured, strict=False):
        if limit is not None:
            late = value is not None and value > limit
            outcome[name] = answered and not late and (value is not None or name == "tpot")
    if outcome:
        outcome["all"] = all(outcome.values())
    return outcome


class Attainment(SlidingSums[PromiseCounts]):
    """SLO attainment by tenant, for each of WINDOWS_S. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        windows = tuple(seconds // SLICE_S for seconds in WINDOWS_S)
        super().__init__(clock, "attainment", PromiseCounts, seconds=SLICE_S, windows=windows, max_names=MAX_TENANTS)

    def record(self, tenant: str, outcome: dict[Promise, bool]) -> None:
        """Counts a completed call of the tenant. Does nothing for calls without an SLO."""
        if outcome:
            attained = {f"held_{promise}": int(is_attained) for promise, is_attained in outcome.items()}
            self.add(tenant, PromiseCounts(calls=1, **dict.fromkeys(outcome, 1), **attained))
