"""A link on which nothing moves until a test lets it."""

from __future__ import annotations

import threading

from benchmarks.local_engine import LocalEngine


class HeldLink:
    """Nothing reaches the device until it is opened."""

    def __init__(self, engine: LocalEngine) -> None:
        self._event = threading.Event()
        engine.engine.store.loader.device_link = self  # type: ignore[assignment]

    def carry(self, size: int) -> None:
        assert self._event.wait(60)

    def open(self) -> None:
        self._event.set()
