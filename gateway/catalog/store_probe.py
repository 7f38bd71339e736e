"""Probes whether the registry answers and is writable. Results are cached, because probes need no key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from adapters.errors import StoreUnavailable
from adapters.store import ObjectStore
from gateway.catalog.cache import GraceCache
from gateway.catalog.threads import LeavableThreads, StoreThreads
from gateway.config import GatewayConfig

READ_KEY = "admin.json"
"""Key of the object that a probe reads. The object need not exist, because the store must only answer."""
WRITE_KEY = "probes/ready"
WRITE_BYTES = 4096
WRITE_EVERY = 10.0
"""Minimum seconds between two writes by probes."""

log = logging.getLogger("gateway")


class StoreProbe:
    def __init__(
        self,
        config: GatewayConfig,
        threads: StoreThreads,
        store: ObjectStore,
        clock: Callable[[], float],
        answered: Callable[[], float],
    ) -> None:
        """`answered` returns the time, by `clock`, of the latest request that the store answered, apart from probes."""
        self._store = store
        self._reads = threads
        self._writes = LeavableThreads(1)  # separate: reads still work if writes hang
        self._seconds = config.store_seconds
        self._answers = GraceCache(
            self._read, clock=clock, fresh=config.cache_seconds, grace=0.0, confirmed=lambda _: answered()
        )
        self._writable = GraceCache(self._write, clock=clock, fresh=WRITE_EVERY, grace=0.0)

    async def check_answers(self) -> None:
        """Checks that the store answers. Raises StoreUnavailable."""
        await self._answers.get(None)

    async def is_writable(self) -> bool:
        """Returns whether the store is writable, as of at most WRITE_EVERY seconds ago."""
        return await self._writable.get(None)

    async def _read(self, _: None) -> object:
        return await self._reads.read(self._store.head, READ_KEY)

    async def _write(self, _: None) -> bool:
        """Returns whether a write succeeded. A failure is also cached, so that it is not repeated with each request."""
        try:
            if self._writes.abandoned:
                raise StoreUnavailable("an earlier write still hangs")
            async with asyncio.timeout(self._seconds):
                await self._writes.run(partial(self._store.put, WRITE_KEY, bytes(WRITE_BYTES)))
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("the registry can't be written to: %s", str(error) or "no answer in time")
            return False
        return True
