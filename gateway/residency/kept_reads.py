"""Reads of the registry that the leader's jobs keep while it is away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable

from adapters.errors import CorruptRecord, StoreUnavailable

log = logging.getLogger("gateway")


class KeptReads:
    """`what` is named in the log, once for each time that it can't be read."""

    def __init__(self, what: str) -> None:
        self._what, self._failing = what, False

    async def renew(self, work: Awaitable[None]) -> None:
        """Lets `work` read it again; where the registry is away or the record damaged, what is known stays."""
        try:
            await work
            self._failing = False
        except (StoreUnavailable, CorruptRecord) as error:
            if not self._failing:
                log.warning(f"{self._what} can't be read; those that are known go on", extra={"why": str(error)})
            self._failing = True
