"""Limits the number of a function's jobs that one worker runs at once. It adapts to what the tenant's limits and the
nodes accept. For calls of batches it is the number of all calls of a tenant.

A refused job is queued again, which takes several writes to the store, and uses up an attempt if a node had no room.
Without this limit, thousands of jobs that wait for a small quota would be claimed and put back endlessly, and many
would become dead letters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
REFUSAL_FORGOTTEN_S = 60.0
CAUTION = 4
"""Number of accepted jobs, in multiples of the window's size, after which the window grows by one job."""

Function = tuple[str, str]
"""Tenant and function; an empty function stands for all functions of the tenant."""


@dataclass
class Window:
    """Limit of a function of which a job was refused recently."""

    size: float
    refused_at: float = 0.0
    closed_until: float = 0.0
    """Time, by the clock, before which no job starts. It is set when a job was refused although no other one was
    running."""
    pause_s: float = FIRST_PAUSE_S
    """Minimum seconds without a job after the next such refusal. The value doubles with each of them, and the first one
    may state fewer."""


class Windows:
    """Windows of all functions. `clock`: monotonic seconds.

    `max_size`: maximum jobs of a function at once while none is refused.
    """

    def __init__(self, max_size: int, clock: Callable[[], float]) -> None:
        self._max_size = max_size
        self._clock = clock
        self._windows: dict[Function, Window] = {}

    def record_refusal(self, function: Function, retry_after_s: float, active: int) -> None:
        """Shrinks the function's window, because one of its `active` running jobs was refused. The job may be accepted
        after `retry_after_s` seconds; 0: unknown."""
        window = self._windows.setdefault(function, Window(self._max_size))
        window.refused_at, window.size = self._clock(), min(window.size, active) - 1
        if window.size < 1:
            is_first = window.pause_s == FIRST_PAUSE_S
            pause_s = retry_after_s if retry_after_s and is_first else max(retry_after_s, window.pause_s)
            window.size, window.closed_until = 1.0, window.refused_at + pause_s
            window.pause_s = min(2 * window.pause_s, MAX_PAUSE_S)

    def record_acceptance(self, function: Function) -> None:
        """Grows the function's window, because an active job was not refused."""
        window = self._windows.get(function)
        if window is not None:
            window.size += 1 / (CAUTION * window.size)
            window.pause_s = FIRST_PAUSE_S

    def may_begin(self, function: Function, active: int) -> bool:
        """Returns whether another job of the function may start while `active` of its jobs run."""
        window = self._windows.get(function)
        if window is None or self._is_old(window):
            return True
        return self._clock() >= window.closed_until and active < int(window.size)

    def closed(self) -> frozenset[Function]:
        """Returns the functions whose jobs may not start now. Also forgets old windows."""
        self.forget_old()
        now = self._clock()
        return frozenset(function for function, window in self._windows.items() if now < window.closed_until)

    def forget_old(self) -> None:
        """Forgets windows without a refusal for REFUSAL_FORGOTTEN_S."""
        self._windows = {function: window for function, window in self._windows.items() if not self._is_old(window)}

    def next_opening(self) -> float | None:
        """Returns the time, by the clock, at which the first closed window opens; None if none is closed."""
        now = self._clock()
        return min((each.closed_until for each in self._windows.values() if now < each.closed_until), default=None)

    def _is_old(self, window: Window) -> bool:
        return self._clock() - window.refused_at >= REFUSAL_FORGOTTEN_S
