"""Repeated reads of the registry by the leader's jobs, which keep the last result while the registry is unavailable."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from adapters.errors import CorruptRecord, StoreUnavailable

log = logging.getLogger("gateway")


class KeptReads:
    """Repeated reads of one record, which the log calls `what`. A series of failures is logged once."""

    def __init__(self, what: str) -> None:
        self._what, self._failing = what, False

    async def renew(self, work: Awaitable[None]) -> None:
        """Awaits `work`, which reads the record. If that fails, the last result stays valid."""
        try:
            await work
            self._failing = False
        except (StoreUnavailable, CorruptRecord) as error:
            if not self._failing:
                log.warning(f"{self._what} can't be read; the last ones read stay in effect", extra={"why": str(error)})
            self._failing = True
