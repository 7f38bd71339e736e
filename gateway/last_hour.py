"""What a function did in the last hour, by the minute, on this gateway worker and on those that tell it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

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


class LastHour:
    """`clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._minutes: OrderedDict[tuple[str, str], dict[int, Counts]] = OrderedDict()
        self._untold: dict[tuple[str, str], Counts] | None = None

    def share(self) -> None:
        """From now on keep what `add` counts for `take_untold`."""
        self._untold = {}

    def take_untold(self) -> dict[tuple[str, str], Counts]:
        """What `add` has counted since this was last asked, by tenant and function."""
        told, self._untold = self._untold or {}, {}
        return told

    def add(self, tenant: str, function: str, counts: Counts) -> None:
        if self._untold is not None and (len(self._untold) < MAX_FUNCTIONS or (tenant, function) in self._untold):
            self._untold.setdefault((tenant, function), Counts()).add(counts)
        self.add_told(tenant, function, counts)

    def add_told(self, tenant: str, function: str, counts: Counts) -> None:
        key, now = (tenant, function), int(self._clock() // 60)
        minutes = self._minutes.setdefault(key, {})
        self._minutes.move_to_end(key)
        if now not in minutes:
            for old in [minute for minute in minutes if minute <= now - MINUTES]:
                del minutes[old]
        minutes.setdefault(now, Counts()).add(counts)
        if len(self._minutes) > MAX_FUNCTIONS:
            self._minutes.popitem(last=False)

    def sums(self, tenant: str, function: str) -> Counts:
        now = int(self._clock() // 60)
        sums = Counts()
        for minute, counts in self._minutes.get((tenant, function), {}).items():
            if minute > now - MINUTES:
                sums.add(counts)
        return sums
