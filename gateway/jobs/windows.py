"""Number of jobs of a function that one worker runs at once: as many as limits and nodes accept.

A refused job is queued again, which takes several writes to the store, and an attempt where a node had no room.
Thousands that wait for a small limit would be claimed and put back without end, and a flood would make dead letters of
them; so the worker begins no more than were accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
FORGOTTEN_S = 60.0
"""Seconds for which a refusal counts."""
CAUTION = 4
"""Accepted jobs, as a multiple of the window, after which the window grows by one."""

Function = tuple[str, str]
"""Tenant and function."""


@dataclass
class Window:
    """Limit of one function that was refused lately."""

    size: float
    """Jobs that may run at once."""
    refused_at: float = 0.0
    closed_until: float = 0.0
    """Time before which none begins: even a single one was refused."""
    pause_s: float = FIRST_PAUSE_S
    """Pause after the next such refusal; doubled with each."""


class Windows:
    """Windows of all functions. `max_size`: jobs of a function at once while nothing refuses them. `clock` is monotonic
    seconds."""

    def __init__(self, max_size: int, clock: Callable[[], float]) -> None:
        self._max_size = max_size
        self._clock = clock
        self._windows: dict[Function, Window] = {}

    def refuse(self, function: Function, seconds: float) -> None:
        """Shrinks the window: an active job was refused, and may be accepted after `seconds`."""
        window = self._windows.setdefault(function, Window(self._max_size))
        window.refused_at, window.size = self._clock(), window.size - 1
        if window.size < 1:
            window.size, window.closed_until = 1.0, window.refused_at + max(seconds, window.pause_s)
            window.pause_s = min(2 * window.pause_s, LONGEST_PAUSE_S)

    def accept(self, function: Function) -> None:
        """Grows the window: an active job was not refused."""
        window = self._windows.get(function)
        if window is not None:
            window.size += 1 / (CAUTION * window.size)
            window.pause_s = FIRST_PAUSE_S

    def may_begin(self, function: Function, active: int) -> bool:
        """Returns whether one more of the function may begin while `active` of it run."""
        window = self._windows.get(function)
        if window is None or self._is_old(window):
            return True
        return self._clock() >= window.closed_until and active < int(window.size)

    def closed(self) -> frozenset[Function]:
        """Returns the functions of which none begins for a while. Forgets old windows."""
        self._windows = {function: window for function, window in self._windows.items() if not self._is_old(window)}
        now = self._clock()
        return frozenset(function for function, window in self._windows.items() if now < window.closed_until)

    def next_opening(self) -> float | None:
        """Returns when the first closed window opens (by the clock); None if none is closed."""
        now = self._clock()
        return min((each.closed_until for each in self._windows.values() if now < each.closed_until), default=None)

    def _is_old(self, window: Window) -> bool:
        return self._clock() - window.refused_at >= FORGOTTEN_S
