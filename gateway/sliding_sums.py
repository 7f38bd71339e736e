"""Sums by key over a sliding window, in slices of time: of what this gateway worker counts and what the others tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, Self, TypeVar


class Summed(Protocol):
    def add(self, other: Self) -> None: ...


Key = TypeVar("Key", bound=Hashable)
Sum = TypeVar("Sum", bound=Summed)


class SlidingSums(Generic[Key, Sum]):
    def __init__(
        self, clock: Callable[[], float], empty: Callable[[], Sum], *, seconds: int, slices: int, most: int
    ) -> None:
        """The window is the last `slices` slices of `seconds`; `empty` is the sum of nothing. Of more than `most` keys
        the one that was counted least recently is forgotten. `clock` is monotonic seconds."""
        self._clock, self._empty = clock, empty
        self._seconds, self._window, self._most = seconds, slices, most
        self._slices: OrderedDict[Key, dict[int, Sum]] = OrderedDict()
        self._untold: dict[Key, Sum] | None = None

    def share(self) -> None:
        """From now on keep what `add` counts for `take_untold`."""
        self._untold = {}

    def take_untold(self) -> dict[Key, Sum]:
        """What `add` has counted since this was last asked."""
        told, self._untold = self._untold or {}, {}
        return told

    def add(self, key: Key, counts: Sum) -> None:
        if self._untold is not None and (len(self._untold) < self._most or key in self._untold):
            self._untold.setdefault(key, self._empty()).add(counts)
        self.add_told(key, counts)

    def add_told(self, key: Key, counts: Sum) -> None:
        """What another worker has counted in the last second."""
        now = self._now()
        slices = self._slices.setdefault(key, {})
        self._slices.move_to_end(key)
        if now not in slices:
            for old in [at for at in slices if at <= now - self._window]:
                del slices[old]
        slices.setdefault(now, self._empty()).add(counts)
        if len(self._slices) > self._most:
            self._slices.popitem(last=False)

    def within(self, key: Key) -> Iterator[tuple[int, Sum]]:
        """The key's slices within the window: (age in slices, sum)."""
        now = self._now()
        for at, counts in self._slices.get(key, {}).items():
            if at > now - self._window:
                yield now - at, counts

    def known(self) -> list[Key]:
        return list(self._slices)

    def _now(self) -> int:
        return int(self._clock() // self._seconds)
