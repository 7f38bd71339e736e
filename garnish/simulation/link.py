"""A link whose transfers share its bandwidth equally."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf

from cluster.performance_model import Transfer


class SharedLink:
    """A link that gives each of k transfers a k-th of its bandwidth. The latency of each counts as bytes that it has to
    move more.

    `_moved` is what a transfer that was there from the beginning would have moved: one of n bytes ends when `_moved`
    has grown by n since it began, however many others come and go.
    """

    def __init__(self, speed: Transfer) -> None:
        self.speed = speed
        self.bytes = 0
        """of the transfers that are under way"""
        self._active = 0
        self._moved = 0.0
        self._at = 0.0
        self._marks: list[tuple[float, int, str, str]] = []
        """(`_moved` at which it is reached, order, what, name)"""
        self._order = 0

    def start(self, name: str, size: int, now: float, ready_share: float) -> None:
        """Begins a transfer of `size` bytes. `reached` tells its end as ("end", name), and before it ("ready", name)
        when `ready_share` of it has arrived."""
        self._move(now)
        cost = size + self.speed.latency * self.speed.bandwidth
        self._mark(self._moved + ready_share * cost, "ready", name)
        self._mark(self._moved + cost, "end", name)
        self._active += 1
        self.bytes += size

    @property
    def next(self) -> float:
        """Returns the time at which the next mark is reached, if no transfer begins before; infinite when there is
        none."""
        if not self._marks:
            return inf
        return self._at + max(0.0, self._marks[0][0] - self._moved) * self._active / self.speed.bandwidth

    def reached(self, now: float, sizes: Mapping[str, int]) -> list[tuple[str, str]]:
        """Returns the marks reached by `now`, in order, as (what, name). `sizes` has the bytes of every transfer that
        is under way."""
        found: list[tuple[str, str]] = []
        while (due := self.next) <= now:
            mark, _, what, name = heappop(self._marks)
            self._at, self._moved = due, max(mark, self._moved)
            if what == "end":
                self._active -= 1
                self.bytes -= sizes[name]
            found.append((what, name))
        return found

    def _move(self, now: float) -> None:
        if self._active:
            self._moved += (now - self._at) * self.speed.bandwidth / self._active
        self._at = now

    def _mark(self, moved: float, what: str, name: str) -> None:
        self._order += 1
        heappush(self._marks, (moved, self._order, what, name))
