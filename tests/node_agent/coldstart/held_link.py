"""A link on which nothing moves until a test lets it."""

from __future__ import annotations

import threading

from tests.support.local_engine import LocalEngine


class HeldLink:
    """No layer reaches the device until it is let, or all are."""

    def __init__(self, engine: LocalEngine) -> None:
        self._let = threading.Semaphore(0)
        self._opened = False
        engine.engine.store.loader.device_link = self  # type: ignore[assignment]

    def carry(self, size: int) -> None:
        if not self._opened:
            assert self._let.acquire(timeout=60)

    def let(self, layers: int) -> None:
        self._let.release(layers)

    def open(self) -> None:
        self._opened = True
        self._let.release(1000)
