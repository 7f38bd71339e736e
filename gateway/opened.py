"""Opens what the gateway's parts need from outside this process: files, the store, processes, nodes and Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from adapters.base_manifest import find_base
from adapters.base_model import BaseModel
from adapters.inspector import Inspector
from adapters.open_store import open_checked_store
from adapters.store import ObjectStore
from cluster.secret import read_secret
from gateway.calls.chat_templates import ChatTemplates
from gateway.calls.grammars import GrammarChecks
from gateway.config import GatewayConfig, usage_directory
from gateway.places.pools import Pools
from gateway.residency.remote_trainer import RemoteTrainer
from gateway.shared_state import Shared, open_shared
from gateway.usage.ledger import UsageLedger, open_ledger
from gateway.workers.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Opened:
    """Settings and metrics of this worker, and everything that is opened before its other parts are made."""

    config: GatewayConfig
    metrics: Metrics
    pools: Pools
    base: BaseModel
    inspector: Inspector
    grammars: GrammarChecks
    templates: ChatTemplates
    trainer: RemoteTrainer
    store: ObjectStore
    secret: str
    usage: UsageLedger
    session: aiohttp.ClientSession
    shared: Shared


@asynccontextmanager
async def open_outside(config: GatewayConfig, metrics: Metrics) -> AsyncIterator[Opened]:
    """Opens the files, the store, the ledger, the connections to nodes and the shared state, and closes them in reverse
    order.

    Raises the parts' exceptions for a missing file or an invalid setting.
    """
    store = await asyncio.to_thread(open_checked_store, config.registry)
    base = await asyncio.to_thread(find_base, Path(config.model_dir), config.base_id, store)
    secret, pools = read_secret(Path(config.secret_file)), Pools(config, metrics.registry)
    inspectors = pools["deploy_checks"].pool.per_tenant + 1  # so that one tenant can't keep all of them busy
    async with AsyncExitStack() as stack:
        yield Opened(
            config=config,
            metrics=metrics,
            pools=pools,
            base=base,
            inspector=stack.enter_context(closing(Inspector(base, inspectors))),
            grammars=stack.enter_context(closing(GrammarChecks(pools["forms"]))),
            templates=stack.enter_context(closing(ChatTemplates(pools["templates"]))),
            trainer=stack.enter_context(closing(RemoteTrainer())),
            store=store,
            secret=secret,
            usage=await stack.enter_async_context(open_ledger(usage_directory(config), store)),
            session=await stack.enter_async_context(_session()),
            shared=await stack.enter_async_context(open_shared(config, secret)),
        )


def _session() -> aiohttp.ClientSession:
    """Returns the HTTP session for all requests to nodes.

    The session has no connection limit, because routing limits the requests on each node, and the middleware
    `Boundary` limits the requests that are open in the gateway.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
