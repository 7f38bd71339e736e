"""Validity of cached records: they are valid until the registry's epoch shows that they may have changed.

The epoch is an object with marks, each of which names a record that is being changed (adapters.epoch). An answer
includes every change that was committed `cache_seconds` ago, because an epoch read since then contains the marks of all
of them. If the epoch can't be read because the store is slow, answers are valid for `cache_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from adapters.epoch import DIRTY_SECONDS, Epoch, Mark, read_epoch
from adapters.errors import StoreUnavailable
from adapters.store import ObjectStore
from gateway.background import background
from gateway.catalog.threads import StoreThreads

POLL_SHARE = 0.8
"""Time between two reads of the epoch, as a fraction of `cache_seconds`."""

log = logging.getLogger("gateway")


class NameWatch:
    """Reads the epoch for one worker. `seconds`: the setting `cache_seconds`.

    `on_mark` is called once with each mark, except for those from before the first read.
    """

    def __init__(self, store: ObjectStore, threads: StoreThreads, clock: Callable[[], float], seconds: float) -> None:
        self._store = store
        self._threads = threads
        self._clock = clock
        self._seconds = seconds
        self._epoch: Epoch | None = None
        self.read_at = float("-inf")
        """Time, by `clock`, at which the latest read of the epoch began."""
        self._dirty: dict[str, float] = {}
        """Time, by `clock`, until which a marked change may still be committed, by key of the record."""
        self._all_dirty_until: float | None = None
        self.on_mark: Callable[[Mark], None] = lambda _: None
        self.forget_all: Callable[[], None] = lambda: None

    def read(self) -> tuple[Epoch, float | None]:
        """Returns the epoch, and the store's time if `apply` needs it. Blocks. Raises StoreUnavailable."""
        epoch = read_epoch(self._store)
        return epoch, self._store.now() if self._begins_anew(epoch) else None

    def confirmed(self, key: str) -> float:
        """Returns the time, by `clock`, up to which a cached copy of the record is known to be current.

        The time is -inf while a marked change may still be committed.
        """
        return float("-inf") if key in self._dirty or self._all_dirty_until is not None else self.read_at

    def running(self) -> AbstractAsyncContextManager[None]:
        """Reads the epoch as long as the context lasts; never if `cache_seconds` is 0, because nothing is cached
        then."""
        return background(*([self._poll] if self._seconds > 0 else []))

    async def _poll(self) -> None:
        away = False
        while True:
            began = self._clock()
            try:
                self.apply(*await self._threads.read(self.read), began)
                away = False
            except StoreUnavailable as error:
                if not away:
                    log.warning(
                        "the registry's epoch can't be read; cached records are read again every second: %s", error
                    )
                away = True
            await asyncio.sleep(max(0.0, POLL_SHARE * self._seconds - (self._clock() - began)))

    def apply(self, epoch: Epoch, now: float | None, began: float) -> None:
        """Applies the result of `read`.

        Calls `on_mark` with the new marks, and `forget_all` if marks may have been missed. `began`: start of the read,
        by `clock`.
        """
        before, self._epoch = self._epoch, epoch
        marks = epoch.marks
        if now is None:
            assert before is not None
            marks = tuple(mark for mark in marks if mark.number > before.number)
        else:
            self._all_dirty_until = max(self._all_dirty_until or 0.0, self._dirty_until(epoch.since, now))
            self.forget_all()
        for mark in marks:
            until = self._dirty_until(mark.at, now)
            if until > began:
                self._dirty[mark.key] = max(until, self._dirty.get(mark.key, 0.0))
            if before is not None:
                self.on_mark(mark)
        self._end_dirty(began)
        self.read_at = began

    def _begins_anew(self, epoch: Epoch) -> bool:
        """Returns whether the epoch may have dropped marks that this worker has not seen."""
        before = self._epoch
        if before is None or before.id != epoch.id or epoch.number < before.number:
            return True
        return bool(epoch.marks) and epoch.marks[0].number > before.number + 1

    def _dirty_until(self, marked: float, now: float | None) -> float:
        """Returns the time, by `clock`, until which a change marked at `marked` may still be committed.

        `marked` and `now` are times by the store's clock. `now` is None if the store's time is unknown; then the mark
        counts as just made.
        """
        ago = 0.0 if now is None else max(0.0, now - marked)
        return self._clock() - ago + DIRTY_SECONDS

    def _end_dirty(self, now: float) -> None:
        """Drops marks whose changes can't be committed any more, and forgets the records that they name. `now`: time by
        `clock`.

        Copies of these records that were read before `now` may be from before the commit.
        """
        if self._all_dirty_until is not None and self._all_dirty_until <= now:
            self._all_dirty_until = None
            self.forget_all()
        for key in [key for key, until in self._dirty.items() if until <= now]:
            del self._dirty[key]
            self.on_mark(Mark(0, key))
