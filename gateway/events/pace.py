"""How many events of a function one worker runs at once: as many as limits and nodes let through.

An event that is refused is queued again, which takes several writes to the store, and an attempt where it was a node
that had no room. Thousands that wait behind a small limit would be claimed and put back without end, and a flood would
make dead letters of them; so the worker begins no more than were let through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
FORGOTTEN_S = 60.0
"""After the last refusal, for which it counts."""
CAUTION = 4
"""So many times as many events as the window holds must be let through before it holds one more."""

Function = tuple[str, str]
"""Tenant and function."""


@dataclass
class Pace:
    """Of one function that was refused lately."""

    window: float
    """Events that it may have at once."""
    refused_at: float = 0.0
    held_until: float = 0.0
    """None of its events begins before, for even a single one was refused."""
    pause: float = FIRST_PAUSE_S
    """Behind the next such refusal; doubled with each."""


class Paces:
    """`most`: the events that a function may have at once while nothing refuses them. `clock` is monotonic seconds."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._paces: dict[Function, Pace] = {}
        self._active: Counter[Function] = Counter()

    def begin(self, function: Function) -> None:
        self._active[function] += 1

    def end(self, function: Function) -> None:
        self._active[function] -= 1
        if not self._active[function]:
            del self._active[function]

    def refuse(self, function: Function, seconds: float) -> None:
        """One of those that have begun was refused, and may be let through so much later."""
        pace = self._paces.setdefault(function, Pace(self._most))
        pace.refused_at, pace.window = self._clock(), pace.window - 1
        if pace.window < 1:
            pace.window, pace.held_until = 1.0, pace.refused_at + max(seconds, pace.pause)
            pace.pause = min(2 * pace.pause, LONGEST_PAUSE_S)

    def let_through(self, function: Function) -> None:
        """One of those that have begun was not refused."""
        pace = self._paces.get(function)
        if pace is not None:
            pace.window += 1 / (CAUTION * pace.window)
            pace.pause = FIRST_PAUSE_S

    def may_begin(self, function: Function) -> bool:
        pace = self._paces.get(function)
        if pace is None or self._is_old(pace):
            return True
        return self._clock() >= pace.held_until and self._active[function] < int(pace.window)

    def held(self) -> frozenset[Function]:
        """Returns the functions of which none begins for a while."""
        self._paces = {function: pace for function, pace in self._paces.items() if not self._is_old(pace)}
        now = self._clock()
        return frozenset(function for function, pace in self._paces.items() if now < pace.held_until)

    def next_at(self) -> float | None:
        """Returns when the first of these may begin again; None if there are none."""
        now = self._clock()
        return min((pace.held_until for pace in self._paces.values() if now < pace.held_until), default=None)

    def _is_old(self, pace: Pace) -> bool:
        return self._clock() - pace.refused_at >= FORGOTTEN_S
