"""Look-ups of keys that nobody knows: few at once and per second, so that random keys cost other callers nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster.errors import ServiceError

LOOKUPS_PER_SECOND = 50
"""Of the whole gateway."""
AT_ONCE = 4
"""Of one worker: fewer than there are threads for reads, which known callers need, too."""
RETRY_AFTER = 1.0


class KeyLookups:
    def __init__(self, per_second: int, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._tokens, self._filled = float(per_second), clock()
        self._running = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a look-up. Raises ServiceError `overloaded` when there is no room for one now."""
        now = self._clock()
        self._tokens = min(self._per_second, self._tokens + (now - self._filled) * self._per_second)
        self._filled = now
        if self._tokens < 1 or self._running >= AT_ONCE:
            message = "too many keys that are not known are being looked up; try again later"
            raise ServiceError("overloaded", message, retry_after=RETRY_AFTER)
        self._tokens -= 1
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
