"""Probes whether the registry answers, and whether it and this gateway's own disk take writes. Results are cached,
because probes need no key."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from adapters.errors import StoreFull, StoreUnavailable
from adapters.store import ObjectStore
from gateway.catalog.cache import GraceCache
from gateway.catalog.threads import LeavableThreads, StoreThreads
from gateway.config import GatewayConfig, usage_directory

READ_KEY = "admin.json"
"""Key of the object that a probe reads. The object need not exist, because the store must only answer."""
WRITE_KEY = "probes/ready"
WRITE_BYTES = 4096
MIN_WRITE_GAP_S = 10.0

UPLOAD_BYTES = 1 << 20
"""Bytes that must fit on the gateway's disk, for uploads and the usage journal."""
STORE_FULL = "the registry can't be written to (its disk is full or read-only): what is to be stored is answered 507"
STORE_CLOSED = "the registry can't be written to: what is to be stored is answered 503"
DISK_FULL = "this gateway's disk is full or read-only: deploys are answered 507, and a kill loses usage"

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
        self._writable = GraceCache(self._write, clock=clock, fresh=MIN_WRITE_GAP_S, grace=0.0)
        self._folders = tuple({Path(config.tmp_dir), usage_directory(config)})
        self._room = GraceCache(self._reserve, clock=clock, fresh=MIN_WRITE_GAP_S, grace=0.0)

    async def check_answers(self) -> None:
        """Checks that the store answers. Raises StoreUnavailable."""
        await self._answers.get(None)

    async def store_problem(self) -> str | None:
        """Returns why the store could not be written at most MIN_WRITE_GAP_S seconds ago; None if it could."""
        return await self._writable.get(None)

    async def disk_problem(self) -> str | None:
        """Returns what this gateway's own disk lacked at most MIN_WRITE_GAP_S seconds ago; None if nothing."""
        return await self._room.get(None)

    async def _read(self, _: None) -> object:
        return await self._reads.read(self._store.head, READ_KEY)

    async def _write(self, _: None) -> str | None:
        """Returns why a write failed; None if it succeeded. A failure is also cached, so that it is not repeated with
        each request."""
        try:
            if self._writes.abandoned:
                raise StoreUnavailable("an earlier write still hangs")
            async with asyncio.timeout(self._seconds):
                await self._writes.run(partial(self._store.put, WRITE_KEY, bytes(WRITE_BYTES)))
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("the registry can't be written to: %s", str(error) or "no answer in time")
            return STORE_FULL if isinstance(error, StoreFull) else STORE_CLOSED
        return None

    async def _reserve(self, _: None) -> str | None:
        """Returns DISK_FULL if the folders of uploads and usage have no room for UPLOAD_BYTES, or the write hangs."""
        try:
            if self._writes.abandoned:
                raise TimeoutError("an earlier write still hangs")
            async with asyncio.timeout(self._seconds):
                await self._writes.run(partial(_reserve_in, self._folders))
        except (OSError, TimeoutError) as error:
            log.warning("this gateway's disk can't be written to: %s", str(error) or "no answer in time")
            return DISK_FULL
        return None


def _reserve_in(folders: tuple[Path, ...]) -> None:
    """Reserves UPLOAD_BYTES in each folder, and frees them. Raises OSError."""
    for folder in folders:
        with TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, UPLOAD_BYTES)
