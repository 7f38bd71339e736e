"""How long what was read of a record stays valid: until the registry's epoch says that it may have changed.

See adapters.epoch. An answer is from after every change that was committed `cache_seconds` ago: an epoch that was read
within that time has marks of all of those. Without one, while the store is slow, answers are valid for `cache_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from adapters.epoch import DIRTY_SECONDS, Epoch, Mark, read_epoch
from adapters.errors import StoreUnavailable
from adapters.store import ObjectStore
from gateway.catalog.threads import StoreThreads

POLL_SHARE = 0.8
"""Of `cache_seconds`, between two readings of the epoch."""

log = logging.getLogger("gateway")


class NameWatch:
    """Of one worker. `on_mark` is told of each mark once, and of those before the first reading never."""

    def __init__(self, store: ObjectStore, threads: StoreThreads, clock: Callable[[], float], seconds: float) -> None:
        self._store = store
        self._threads = threads
        self._clock = clock
        self._seconds = seconds
        self._known: Epoch | None = None
        self._read_at = float("-inf")
        """When the newest reading began."""
        self._dirty: dict[str, float] = {}
        """Until when each marked record may still be committed."""
        self._all_dirty_until: float | None = None
        self.on_mark: Callable[[Mark], None] = lambda _: None
        self.forget_all: Callable[[], None] = lambda: None

    def confirmed(self, key: str) -> float:
        """Until when nothing was committed of the record, since it was last read or forgotten; by `clock`."""
        return float("-inf") if key in self._dirty or self._all_dirty_until is not None else self._read_at

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reads the epoch as long as the context lasts; never with `cache_seconds` 0, when nothing is kept."""
        if self._seconds <= 0:
            yield
            return
        task = asyncio.create_task(self._poll())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _poll(self) -> None:
        away = False
        while True:
            began = self._clock()
            try:
                self.apply(await self._threads.read(read_epoch, self._store), began)
                away = False
            except StoreUnavailable as error:
                if not away:
                    log.warning("the registry's epoch can't be read: names are looked up every second: %s", error)
                away = True
            await asyncio.sleep(max(0.0, POLL_SHARE * self._seconds - (self._clock() - began)))

    def apply(self, epoch: Epoch, began: float) -> None:
        """The epoch as a reading found it that `began` then."""
        known, self._known = self._known, epoch
        if known is None or known.id != epoch.id or (epoch.marks and epoch.marks[0].number > known.number + 1):
            self._all_dirty_until = began + DIRTY_SECONDS
            self.forget_all()
        for mark in epoch.marks:
            if known is not None and (known.id != epoch.id or mark.number > known.number):
                self._dirty[mark.key] = began + DIRTY_SECONDS
                self.on_mark(mark)
        self._end_dirty(began)
        self._read_at = began

    def _end_dirty(self, now: float) -> None:
        """What was read of them until now may be from before the commit."""
        if self._all_dirty_until is not None and self._all_dirty_until <= now:
            self._all_dirty_until = None
            self.forget_all()
        for key in [key for key, until in self._dirty.items() if until <= now]:
            del self._dirty[key]
            self.on_mark(Mark(0, key))
