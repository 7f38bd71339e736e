"""Limits lookups of unknown keys, concurrently and per second, so that random keys do not slow down other callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import ServiceError
from cluster.limits import Bucket

MAX_LOOKUPS_PER_S = 50
AT_ONCE = 4
"""Maximum concurrent lookups of one worker. There are more threads for reads than that, so known callers are still
served."""
RETRY_AFTER = 1.0


class KeyLookups:
    def __init__(self, per_second: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bucket = Bucket(per_second, per_second, clock())
        self._running = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Holds one of the AT_ONCE places for a lookup as long as the context lasts. Raises ServiceError `overloaded`
        if none is free, or if there were too many lookups in this second."""
        if self._running >= AT_ONCE or not self._bucket.take(1, self._clock()):
            message = "too many keys that are not known are being looked up; try again later"
            raise ServiceError("overloaded", message, retry_after=RETRY_AFTER)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
