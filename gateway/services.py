"""Everything that the routes share, made once in the lifespan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time

import aiohttp
from starlette.requests import Request

from adapters.base_model import BaseModel, load_base_model
from adapters.open_store import open_checked_store
from adapters.registry import Registry
from adapters.sources import Sources
from adapters.store import ObjectStore
from adapters.tenants import Tenants
from cluster.secret import read_secret
from cluster.state import ClusterState, MemoryClusterState
from cluster.text import BaseText
from gateway.cache import GraceCache
from gateway.called import CalledDigests
from gateway.callers import Callers
from gateway.concurrency import TenantPlaces
from gateway.config import GatewayConfig, usage_directory
from gateway.deploy_slots import DeploySlots
from gateway.dispatch import Dispatcher
from gateway.functions import Functions
from gateway.last_hour import LastHour
from gateway.metrics import Metrics
from gateway.node_calls import NodeCalls
from gateway.node_client import NodeClient
from gateway.running import Running
from gateway.scheduling.policy import make_policy
from gateway.threads import WRITE_THREADS, LeavableThreads, StoreThreads
from gateway.usage.ledger import UsageLedger, open_ledger

TEXT_THREADS = 2
SOURCE_THREADS = 4
PROBE_KEY = "admin.json"
"""Whether this object exists does not matter: the store must only answer."""
CLOCK_SECONDS = 60.0
"""By which this host's clock may differ from the store's without a word."""

log = logging.getLogger("gateway")


@dataclass(frozen=True)
class Services:
    config: GatewayConfig
    base: BaseModel
    text: BaseText
    text_threads: LeavableThreads
    registry: Registry
    threads: StoreThreads
    probe: GraceCache[None, object]
    """Whether the store answers: anyone may ask that without a key, so it is asked once a second at most."""
    tenants: Tenants
    callers: Callers
    places: TenantPlaces
    usage: UsageLedger
    functions: Functions
    cluster: ClusterState
    secret: str
    dispatcher: Dispatcher
    node_calls: NodeCalls
    running: Running
    metrics: Metrics
    last_hour: LastHour
    called: CalledDigests
    deploys: DeploySlots
    sources: Sources
    source_threads: LeavableThreads


def _compare_clocks(store: ObjectStore) -> None:
    """Raises StoreUnavailable."""
    ahead = time() - store.now()
    if abs(ahead) > CLOCK_SECONDS:
        log.warning("this host's clock is %+.0f s from the registry's: usage is counted in other hours", ahead)


def services_of(request: Request) -> Services:
    services = request.state.services
    assert isinstance(services, Services)
    return services


@asynccontextmanager
async def open_services(config: GatewayConfig, metrics: Metrics) -> AsyncIterator[Services]:
    """Raises what the parts raise when a file is missing or a setting is wrong: the gateway does not start then."""
    base = load_base_model(Path(config.model_dir), config.base_id)
    store = await asyncio.to_thread(open_checked_store, config.registry)
    await asyncio.to_thread(_compare_clocks, store)
    registry, tenants = Registry(store, base), Tenants(store)
    # Deploys take long: however many there are, a rollback finds a thread.
    threads = StoreThreads(config.store_seconds, config.max_deploys + WRITE_THREADS)
    cluster = MemoryClusterState(monotonic, expiry=config.record_expiry)
    secret = read_secret(Path(config.secret_file))
    running, last_hour, called = Running(), LastHour(monotonic), CalledDigests()
    callers, places = Callers(config, tenants, threads, monotonic), TenantPlaces()
    # No limit here: placement bounds what each node gets, and the boundary what the gateway takes.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    async with (
        open_ledger(usage_directory(config), store) as usage,
        aiohttp.ClientSession(
            connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session,
    ):
        client = NodeClient(session, cluster, secret, connect=config.connect_seconds, silence=config.node_silence)
        policy = make_policy(config.policy)
        yield Services(
            config=config,
            base=base,
            text=BaseText(Path(config.model_dir)),
            text_threads=LeavableThreads(TEXT_THREADS),
            registry=registry,
            threads=threads,
            probe=GraceCache(
                lambda _: threads.read(store.head, PROBE_KEY), clock=monotonic, fresh=config.cache_seconds, grace=0.0
            ),
            tenants=tenants,
            callers=callers,
            places=places,
            usage=usage,
            functions=Functions(config, registry, threads, monotonic),
            cluster=cluster,
            secret=secret,
            dispatcher=Dispatcher(
                cluster, policy, client, base.fingerprint, running, metrics, last_hour, called, places
            ),
            node_calls=NodeCalls(session, secret, connect=config.connect_seconds),
            running=running,
            metrics=metrics,
            last_hour=last_hour,
            called=called,
            deploys=DeploySlots(
                uploads=config.max_uploads,
                tenant_uploads=config.max_tenant_uploads,
                stores=config.max_deploys,
                tenant_stores=config.max_tenant_deploys,
                wait_seconds=config.deploy_wait,
            ),
            sources=Sources(config.allowed_sources),
            source_threads=LeavableThreads(SOURCE_THREADS),
        )
