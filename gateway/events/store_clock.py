"""The store's clock, without a question to the store each time: all gateways of a registry agree on it."""

from __future__ import annotations

from collections.abc import Callable

from adapters.errors import StoreUnavailable
from adapters.store import ObjectStore
from gateway.catalog.threads import StoreThreads

VALID_S = 600.0
"""After which the distance of this host's clock from the store's is measured again."""


class StoreClock:
    """`clock` is monotonic seconds."""

    def __init__(self, store: ObjectStore, threads: StoreThreads, clock: Callable[[], float]) -> None:
        self._store = store
        self._threads = threads
        self._clock = clock
        self._ahead: float | None = None
        self._asked = 0.0

    async def now(self) -> float:
        """Returns the Unix time by the store's clock. Raises StoreUnavailable while it was never known."""
        if self._ahead is None or self._clock() - self._asked > VALID_S:
            await self._measure()
        assert self._ahead is not None
        return self._clock() + self._ahead

    async def _measure(self) -> None:
        self._asked = asked = self._clock()
        try:
            self._ahead = await self._threads.read(self._store.now) - asked
        except StoreUnavailable:
            if self._ahead is None:
                raise
