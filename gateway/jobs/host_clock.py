"""Compares this host's clock with the registry's, and logs a warning when they differ: once for each change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from adapters.errors import StoreUnavailable
from gateway.jobs.clocks import StoreClock

CLOCK_SECONDS = 60.0
"""Difference between the clocks, in seconds, above which a warning is logged. A further one is logged if the difference
changes by as much."""
CHECK_S = 10.0
"""Seconds between two comparisons. They need no request as long as nothing has changed."""

log = logging.getLogger("gateway")


class HostClock:
    """Watch of this host's clock. `unix`: Unix time by this clock."""

    def __init__(self, store_clock: StoreClock, unix: Callable[[], float]) -> None:
        self._store_clock = store_clock
        self._unix = unix
        self._logged = 0.0
        """Difference, in seconds, that the last warning named; 0 if the clocks agreed since."""

    async def run(self) -> None:
        """Compares the clocks until cancelled."""
        while True:
            with suppress(StoreUnavailable):  # whoever needs the store logs it
                await self.compare()
            await asyncio.sleep(CHECK_S)

    async def compare(self) -> None:
        """Compares the clocks once. Raises StoreUnavailable."""
        if not self._has_changed(await self._ahead()):
            return
        await self._store_clock.measure()  # the store's clock may have changed since it was read
        ahead = await self._ahead()
        if not self._has_changed(ahead):
            return
        if abs(ahead) <= CLOCK_SECONDS:
            log.warning("this host's clock is right again: it differs by %+.0f s from the registry's", ahead)
            self._logged = 0.0
            return
        log.warning(
            "this host's clock differs by %+.0f s from the registry's: usage is counted in wrong hours, and receivers "
            "may refuse webhooks for their webhook-timestamp",
            ahead,
        )
        self._logged = ahead

    async def _ahead(self) -> float:
        """Returns the seconds by which this host's clock is ahead of the store's."""
        return self._unix() - await self._store_clock.now()

    def _has_changed(self, ahead: float) -> bool:
        """Returns whether the difference is not the one that was logged last."""
        if not self._logged:
            return abs(ahead) > CLOCK_SECONDS
        # Below half the limit, so that a difference close to it does not lead to a line in each comparison.
        return abs(ahead) < CLOCK_SECONDS / 2 or abs(ahead - self._logged) > CLOCK_SECONDS
