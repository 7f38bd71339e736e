"""Work that an engine does while nobody calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

QUIET_S = 3.0
"""Seconds without requests and loads after which a node counts as idle, since recent callers may call again."""


class IdleWork(Protocol):
    """Work that the engine's thread does while the engine is idle, such as measuring calls with CPU workers."""

    def work(self, should_yield: Callable[[], bool]) -> bool:
        """Does a piece of work, until `should_yield` returns True. Returns False when there is nothing to do now."""

    def close(self) -> None: ...


class EndingWork(Protocol):
    """Idle work that ends for good."""

    @property
    def ended(self) -> bool:
        """Returns whether all work is done or was given up."""

    def work(self, should_yield: Callable[[], bool]) -> bool:
        """Does a piece of work, until `should_yield` returns True. Returns False when there is nothing to do now."""
