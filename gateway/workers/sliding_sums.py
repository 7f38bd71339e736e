"""Sums of this gateway worker's counts over sliding windows. They are kept by name (a tenant's or a function's) and by
time slice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import msgspec


class Sums(msgspec.Struct):
    """Numbers that are added field by field. Redis stores them in the order of the fields, which must not change."""

    def add(self, sums: Self) -> None:
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(sums, field))


Sum = TypeVar("Sum", bound=Sums)


class SlidingSums(Generic[Sum]):
    def __init__(
        self,
        clock: Callable[[], float],
        kind: str,
        empty: type[Sum],
        seconds: int,
        windows: tuple[int, ...],
        max_names: int,
    ) -> None:
        """`windows`: lengths of the windows in slices of `seconds`, ascending. `empty`: type of the sums.

        Beyond `max_names` names the least recently counted one is forgotten. `clock`: monotonic seconds.
        """
        self.kind, self.empty, self.seconds, self.windows, self.max_names = kind, empty, seconds, windows, max_names
        self._clock = clock
        self._slices: OrderedDict[str, dict[int, Sum]] = OrderedDict()
        self._unreported: dict[int, dict[str, Sum]] | None = None

    def report_all(self) -> None:
        """Marks all current slices as unreported, and records later counts for `take_unreported`."""
        self._unreported = {}
        for name, slices in self._slices.items():
            for at, counts in slices.items():
                self._unreported.setdefault(at, {})[name] = msgspec.structs.replace(counts)

    def take_unreported(self, limit: int) -> list[tuple[str, int, Sum]]:
        """Returns up to `limit` unreported sums as (name, number of the slice, sum), and marks them as reported."""
        unreported: list[tuple[str, int, Sum]] = []
        while self._unreported and len(unreported) < limit:
            at, sums = next(iter(self._unreported.items()))
            while sums and len(unreported) < limit:
                name, counts = sums.popitem()
                unreported.append((name, at, counts))
            if not sums:
                del self._unreported[at]
        return unreported

    def add(self, name: str, counts: Sum) -> None:
        slices, now = self._slices.setdefault(name, {}), self._now()
        self._slices.move_to_end(name)
        self._forget(slices, now)
        slices.setdefault(now, self.empty()).add(counts)
        if len(self._slices) > self.max_names:
            self._slices.popitem(last=False)
        if self._unreported is not None:
            self._forget(self._unreported, now)
            unreported = self._unreported.setdefault(now, {})
            if len(unreported) < self.max_names or name in unreported:
                unreported.setdefault(name, self.empty()).add(counts)

    def of(self, name: str) -> list[Sum]:
        """Returns one sum per window."""
        sums, now = [self.empty() for _ in self.windows], self._now()
        for at, counts in self._slices.get(name, {}).items():
            for window, total in zip(self.windows, sums, strict=True):
                if at > now - window:
                    total.add(counts)
        return sums

    def all(self) -> dict[str, list[Sum]]:
        """Returns the sums of each name, one per window."""
        return {name: self.of(name) for name in self._slices}

    def age(self, at: int) -> float:
        """Returns the seconds since the slice with the number `at` ended."""
        return max(0.0, self._clock() - (at + 1) * self.seconds)

    def _forget(self, slices: dict[int, Any], now: int) -> None:
        """Removes slices older than the longest window, when the slice `now` begins."""
        if now not in slices:
            for old in [at for at in slices if at <= now - self.windows[-1]]:
                del slices[old]

    def _now(self) -> int:
        return int(self._clock() // self.seconds)
