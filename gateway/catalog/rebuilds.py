"""Artifacts made again, for another base model or because one was damaged, apart from the threads of look-ups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from adapters.errors import AdapterError
from adapters.registry import Registry
from gateway.catalog.threads import LeavableThreads

THREADS = 2
"""Each reads, checks and writes a whole adapter."""
MAX_WAITING = 64
"""Artifacts that are being made or wait for it; of more, the callers come again."""

log = logging.getLogger("gateway")


class Rebuilds:
    """Makes each digest's artifact once, however many ask. Failures are cached by the registry's contents."""

    def __init__(self, registry: Registry, on_rebuilt: Callable[[str, str], None]) -> None:
        """`made` is called with the function (tenant, name) whose artifact was made, or can't be."""
        self._registry = registry
        self._on_rebuilt = on_rebuilt
        self._threads = LeavableThreads(THREADS)
        self._waiting: dict[str, asyncio.Task[None]] = {}

    def request(self, tenant: str, name: str, version: int, digest: str) -> None:
        """Begin to make the artifact. No effect while it is being made, or while the queue is full."""
        if digest not in self._waiting and len(self._waiting) < MAX_WAITING:
            self._waiting[digest] = asyncio.ensure_future(self._make(tenant, name, version, digest))

    async def _make(self, tenant: str, name: str, version: int, digest: str) -> None:
        try:
            problem = await self._threads.run(partial(self._registry.make_artifact, tenant, name, version))
            if problem:
                log.warning("version %d of %s/%s: its artifact is made again: it %s", version, tenant, name, problem)
        except AdapterError as error:
            log.warning("version %d of %s/%s: its artifact is not made: %s", version, tenant, name, error)
        except Exception:  # the border of a task: nobody waits for it
            log.exception("version %d of %s/%s: its artifact is not made", version, tenant, name)
        finally:
            del self._waiting[digest]
            self._on_rebuilt(tenant, name)
