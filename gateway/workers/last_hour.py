"""Counts of each function in the last hour, in slices of a minute, from this gateway worker."""

from __future__ import annotations

from collections.abc import Callable

from gateway.workers.sliding_sums import SlidingSums, Sums

MINUTES = 60
MAX_FUNCTIONS = 2000


class Counts(Sums):
    """Counts of a function's calls in one slice or window."""

    invocations: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_tokens: int = 0
    ttft_seconds: float = 0.0


class LastHour(SlidingSums[Counts]):
    """Counts of calls by tenant and function. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, "hour", Counts, seconds=60, windows=(MINUTES,), max_names=MAX_FUNCTIONS)

    def record(self, tenant: str, function: str, counts: Counts) -> None:
        self.add(name_of(tenant, function), counts)


def name_of(tenant: str, function: str) -> str:
    """Returns the name `tenant/function`. Neither part contains a slash."""
    return f"{tenant}/{function}"
