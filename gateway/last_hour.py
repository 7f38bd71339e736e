"""What a function did in the last hour, by the minute, on this gateway worker and on those that tell it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gateway.sliding_sums import SlidingSums

MINUTES = 60
MAX_FUNCTIONS = 2000
"""Functions that are counted at once; the one that was called least recently is forgotten."""


class Counts(msgspec.Struct):
    """Sums over some time."""

    invocations: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_tokens: int = 0
    ttft_seconds: float = 0.0

    def add(self, other: Counts) -> None:
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class LastHour(SlidingSums[tuple[str, str], Counts]):
    """By tenant and function. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, Counts, seconds=60, slices=MINUTES, most=MAX_FUNCTIONS)

    def sums(self, tenant: str, function: str) -> Counts:
        sums = Counts()
        for _, counts in self.within((tenant, function)):
            sums.add(counts)
        return sums
