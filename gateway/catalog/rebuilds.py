"""Rebuilds artifacts, for another base model or because they are damaged, in threads separate from lookups."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from adapters.errors import AdapterError
from adapters.registry import Registry
from gateway.catalog.threads import LeavableThreads
from gateway.places.places import Places, working_for

MAX_WAITING = 16
"""Maximum artifacts of a tenant that are being rebuilt or wait to be rebuilt. Further requests are ignored, and callers
retry."""

log = logging.getLogger("gateway")


class Rebuilds:
    """Rebuilds artifacts: each digest's artifact once, however many calls request it. The registry caches failures."""

    def __init__(self, registry: Registry, on_rebuilt: Callable[[str, str], None], places: Places | int) -> None:
        """`on_rebuilt` is called with tenant and name of the function when its rebuild has ended, even if it failed.
        `places`: as in LeavableThreads; each thread reads, checks and writes a complete adapter."""
        self._registry = registry
        self._on_rebuilt = on_rebuilt
        self._threads = LeavableThreads(places)
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._waiting_by_tenant: Counter[str] = Counter()

    def request(self, tenant: str, name: str, version: int, digest: str) -> None:
        """Starts to rebuild an artifact. Does nothing if it is being rebuilt already, or if the tenant's queue is
        full."""
        if digest not in self._waiting and self._waiting_by_tenant[tenant] < MAX_WAITING:
            self._waiting_by_tenant[tenant] += 1
            self._waiting[digest] = asyncio.ensure_future(self._make(tenant, name, version, digest))

    async def _make(self, tenant: str, name: str, version: int, digest: str) -> None:
        try:
            with working_for(tenant):
                problem = await self._threads.run(partial(self._registry.make_artifact, tenant, name, version))
            if problem:
                log.warning(
                    "the artifact of version %d of %s/%s is built again, because it %s", version, tenant, name, problem
                )
        except AdapterError as error:
            log.warning("version %d of %s/%s can't be loaded: %s", version, tenant, name, error)
        except Exception:  # nobody awaits this task
            log.exception("version %d of %s/%s can't be loaded", version, tenant, name)
        finally:
            del self._waiting[digest]
            self._waiting_by_tenant -= Counter([tenant])
            self._on_rebuilt(tenant, name)
