"""Makes the store's parts of the gateway: records of functions and tenants, with this worker's caches of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from adapters.registry import Registry
from adapters.tenants import Tenants
from cluster.text import BaseText
from gateway.catalog.callers import Callers
from gateway.catalog.functions import Functions
from gateway.catalog.name_watch import NameWatch
from gateway.catalog.threads import StoreThreads
from gateway.events.destinations import Destinations
from gateway.opened import Opened

log = logging.getLogger("gateway")


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records of functions and tenants in the store, with this worker's caches of them."""

    registry: Registry
    tenants: Tenants
    threads: StoreThreads
    name_watch: NameWatch
    functions: Functions
    callers: Callers
    text: BaseText
    destinations: Destinations

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reads the tenants once, and keeps the caches up to date with the registry. Raises StoreUnavailable."""
        await self.callers.learn_tenants()
        async with self.name_watch.running():
            yield


def make_records(opened: Opened) -> Records:
    config, store, pools = opened.config, opened.store, opened.pools
    registry, tenants = Registry(store, opened.base, opened.inspector.inspect), Tenants(store)
    threads = StoreThreads(config.store_seconds, pools["store_writes"], pools["store_reads"])
    name_watch = NameWatch(store, threads, monotonic, config.cache_seconds)
    functions = Functions(config, registry, threads, monotonic, name_watch.confirmed, pools["rebuilds"])
    callers = Callers(config, tenants, threads, monotonic, name_watch.confirmed)
    text = BaseText(Path(config.model_dir))
    if text.template_problem:
        log.warning("chats with the base's template are refused", extra={"reason": text.template_problem})
    return Records(
        registry=registry,
        tenants=tenants,
        threads=threads,
        name_watch=name_watch,
        functions=functions,
        callers=callers,
        text=text,
        destinations=Destinations(
            functions=functions,
            callers=callers,
            base_id=opened.base.id,
            hosts=config.webhook_hosts,
            max_timeout=config.max_timeout,
        ),
    )
