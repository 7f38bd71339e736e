"""Creates the gateway's parts when the application starts, and assigns them to the routes' groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time

import aiohttp

from adapters.base_model import BaseModel, load_base_model
from adapters.inspector import Inspector
from adapters.open_store import open_checked_store
from adapters.registry import Registry
from adapters.sources import Sources
from adapters.store import ObjectStore
from adapters.tenants import Tenants
from cluster.leases import Leases
from cluster.record_check import RecordRates
from cluster.secret import read_secret
from cluster.text import BaseText
from gateway.batches.runner import make_batches
from gateway.calls.accounting import Accounting
from gateway.calls.breaker import Breakers
from gateway.calls.chat_templates import ChatTemplates
from gateway.calls.dispatch import Dispatcher, Generation
from gateway.calls.migration import Migration
from gateway.calls.node_calls import NodeCalls
from gateway.calls.node_client import NodeClient
from gateway.calls.node_watch import NodeWatches
from gateway.calls.request import InputProcessor
from gateway.calls.routing import Router
from gateway.calls.scale_from_zero import FirstNodeWait
from gateway.catalog.callers import Callers
from gateway.catalog.functions import Functions
from gateway.catalog.name_watch import NameWatch
from gateway.catalog.store_probe import StoreProbe
from gateway.catalog.suggestions import Suggestions
from gateway.catalog.threads import LeavableThreads, StoreThreads
from gateway.changes import Changes
from gateway.config import GatewayConfig, usage_directory
from gateway.events.calls import EventCalls
from gateway.events.event_store import EventStore
from gateway.events.events import Events
from gateway.events.jobs import event_jobs
from gateway.events.metrics import EventMetrics
from gateway.groups import Admin, Calls, Catalog, Nodes
from gateway.leader.leader import LEASE_SECONDS, Leader, worker_name
from gateway.leader.metrics import LeaderMetrics
from gateway.leader.store_leases import STORE_LEASE_SECONDS, StoreLeases
from gateway.leader.tick import Job
from gateway.places.pools import Pools
from gateway.residency.history import CallHistory
from gateway.residency.metrics import ResidencyMetrics
from gateway.residency.orders import ResidencyOrders
from gateway.residency.remote_trainer import RemoteTrainer, make_forecaster
from gateway.residency.residency import Parts, Residency
from gateway.residency.schedules import WarmSchedules
from gateway.residency.standing import StandingPolicies
from gateway.residency.warming import Warming
from gateway.scheduling.dlora import Migrates
from gateway.scheduling.policy import make_policy
from gateway.shared_state import Shared, open_shared
from gateway.usage.compaction import UsageCompaction
from gateway.usage.ledger import UsageLedger, open_ledger
from gateway.usage.residents import Owners, ResidentMeter
from gateway.workers.called import CalledDigests
from gateway.workers.metrics import Metrics
from gateway.workers.peers import DigestCalled
from gateway.workers.windows import Windows

CLOCK_SECONDS = 60.0
"""Difference between the clocks of this host and the store, in seconds, above which a warning is logged."""

log = logging.getLogger("gateway")


@dataclass(frozen=True, kw_only=True)
class Services:
    """Groups of parts for the routes, and the suggestions for the boundary."""

    calls: Calls
    catalog: Catalog
    nodes: Nodes
    admin: Admin
    suggestions: Suggestions


def _compare_clocks(store: ObjectStore) -> None:
    """Logs a warning if this host's clock differs from the store's by more than CLOCK_SECONDS. Raises
    StoreUnavailable."""
    ahead = time() - store.now()
    if abs(ahead) > CLOCK_SECONDS:
        log.warning("this host's clock is %+.0f s from the registry's: usage is counted in other hours", ahead)


@dataclass(frozen=True)
class _Opened:
    """Parts of the gateway that are opened first, because they need files, the store, or connections to other
    processes."""

    pools: Pools
    base: BaseModel
    inspector: Inspector
    templates: ChatTemplates
    trainer: RemoteTrainer
    store: ObjectStore
    secret: str
    usage: UsageLedger
    session: aiohttp.ClientSession
    shared: Shared


@asynccontextmanager
async def open_services(config: GatewayConfig, metrics: Metrics) -> AsyncIterator[Services]:
    """Opens the ledger, the connections to nodes and the shared state, and yields the services.

    Everything opened is closed in reverse order at the end. Other parts are in this process's memory and need no
    closing; threads that hang are abandoned. Raises the parts' exceptions for a missing file or an invalid setting, so
    that the gateway does not start.
    """
    base = load_base_model(Path(config.model_dir), config.base_id)
    store = await asyncio.to_thread(open_checked_store, config.registry)
    await asyncio.to_thread(_compare_clocks, store)
    secret, pools = read_secret(Path(config.secret_file)), Pools(config, metrics.registry)
    with (
        closing(Inspector(base)) as inspector,
        closing(ChatTemplates(pools["templates"])) as templates,
        closing(RemoteTrainer()) as trainer,
    ):
        async with (
            open_ledger(usage_directory(config), store) as usage,
            _session() as session,
            open_shared(config, secret) as shared,
            AsyncExitStack() as running,
        ):
            opened = _Opened(pools, base, inspector, templates, trainer, store, secret, usage, session, shared)
            yield await _start(config, metrics, opened, running)


async def _start(config: GatewayConfig, metrics: Metrics, opened: _Opened, running: AsyncExitStack) -> Services:
    """Creates the parts, connects those that report changes to each other, and starts their tasks in `running`. Returns
    the services."""
    shared, store, base, fingerprint = opened.shared, opened.store, opened.base, opened.base.fingerprint
    registry, tenants = Registry(store, base, opened.inspector.inspect), Tenants(store)
    pools = opened.pools
    threads = StoreThreads(config.store_seconds, pools["store_writes"], pools["store_reads"])
    name_watch = NameWatch(store, threads, monotonic, config.cache_seconds)
    functions = Functions(config, registry, threads, monotonic, name_watch.confirmed, pools["rebuilds"])
    callers = Callers(config, tenants, threads, monotonic, name_watch.confirmed)
    node_calls = NodeCalls(opened.session, opened.secret, connect=config.connect_seconds)
    residency = _make_residency(config, opened, metrics, functions, threads, node_calls)
    dispatcher, migration = _make_dispatcher(config, metrics, opened, functions, residency)
    accounting, text = dispatcher.accounting, BaseText(Path(config.model_dir))
    inputs = InputProcessor(
        base=base,
        text=text,
        text_threads=LeavableThreads(pools["texts"]),
        templates=opened.templates,
        functions=functions,
        callers=callers,
        cluster=shared.cluster,
        request_timeout=config.request_timeout,
        max_timeout=config.max_timeout,
        count_usage=opened.usage.add,
    )
    events = Events(
        EventStore(store, EventMetrics(metrics.registry)),
        StoreThreads(config.store_seconds, pools["event_writes"], pools["event_reads"]),
        shared.events,
    )
    changes = Changes(
        store=store,
        threads=threads,
        callers=callers,
        functions=functions,
        residency=residency,
        running=dispatcher.running,
        called=dispatcher.called,
        explanations=dispatcher.router.explanations,
        peers=shared.peers,
    )
    name_watch.on_mark, name_watch.forget_all = changes.read_mark, changes.forget_all
    shared.peers.on_message, functions.on_change = changes.receive, changes.function_changed
    residency.on_provisioned = dispatcher.called.run
    windows = Windows(shared.link, accounting.last_hour, accounting.attainment, accounting.loads)
    warming = Warming(shared.cluster, fingerprint, functions, node_calls, hold=residency.hold)
    services = Services(
        calls=Calls(
            config=config,
            inputs=inputs,
            dispatcher=dispatcher,
            events=events,
            event_calls=EventCalls(
                events=events,
                inputs=inputs,
                dispatcher=dispatcher,
                webhook_hosts=config.webhook_hosts,
                store=store,
                threads=threads,
                pools=pools,
            ),
            batches=make_batches(
                store,
                shared.cluster,
                callers,
                base=fingerprint,
                name=worker_name(),
                registry=metrics.registry,
                unix=events.clock.now,
                places=pools["batch_store"],
            ),
            callers=callers,
            pools=pools,
            registry=registry,
            threads=threads,
            peers=shared.peers,
        ),
        catalog=Catalog(
            config=config,
            base=base,
            text=text,
            registry=registry,
            threads=threads,
            functions=functions,
            changes=changes,
            templates=opened.templates,
            pools=pools,
            sources=Sources(config.allowed_sources),
            source_threads=LeavableThreads(pools["sources"]),
            cluster=shared.cluster,
            called=dispatcher.called,
            windows=windows,
            warming=warming,
            residency=residency,
        ),
        nodes=Nodes(
            config=config,
            base=base,
            secret=opened.secret,
            cluster=shared.cluster,
            node_calls=node_calls,
            record_rates=RecordRates(monotonic),
            breakers=dispatcher.router.breakers,
            hold=dispatcher.hold,
            leases=shared.leases,
            windows=windows,
            metrics=metrics,
            probe=StoreProbe(config, threads, store, monotonic, lambda: name_watch.read_at),
            callers=callers,
            registry=registry,
            threads=threads,
        ),
        admin=Admin(
            config=config,
            tenants=tenants,
            callers=callers,
            changes=changes,
            registry=registry,
            threads=threads,
            usage=opened.usage,
            windows=windows,
        ),
        suggestions=Suggestions(registry, threads, monotonic),
    )
    await callers.learn_tenants()
    jobs = [
        Job("usage_compaction", UsageCompaction(store, monotonic).run),
        *residency.jobs(),
        ResidentMeter(
            shared.cluster,
            registry,
            threads,
            residency.owners,
            pinned=residency.provisioned,
            count=opened.usage.add,
            clock=monotonic,
        ).job(),
        *event_jobs(events.store, events.announce),
    ]
    await running.enter_async_context(name_watch.running())
    await running.enter_async_context(windows.running())
    if migration is not None:
        await running.enter_async_context(migration.running())
    await running.enter_async_context(warming.running())
    await running.enter_async_context(residency.running())
    await running.enter_async_context(_make_leader(config, metrics, opened, jobs).running())
    return services


def _make_leader(config: GatewayConfig, metrics: Metrics, opened: _Opened, jobs: list[Job]) -> Leader:
    alone = config.redis is None
    leases: Leases = StoreLeases(opened.store, monotonic) if alone else opened.shared.leases
    seconds = STORE_LEASE_SECONDS if alone else LEASE_SECONDS
    return Leader(leases, worker_name(), jobs, LeaderMetrics(metrics.registry), monotonic, seconds, alone=alone)


def _make_residency(
    config: GatewayConfig,
    opened: _Opened,
    metrics: Metrics,
    functions: Functions,
    threads: StoreThreads,
    node_calls: NodeCalls,
) -> Residency:
    shared, shown = opened.shared, ResidencyMetrics(metrics.registry)
    parts = Parts(
        history=CallHistory(partial(make_forecaster, config.predictor, opened.trainer), monotonic, time),
        schedules=WarmSchedules(opened.store, threads, functions, unix=time),
        standing=StandingPolicies(opened.store, threads, functions),
        owners=Owners(),
        orders=ResidencyOrders(node_calls, shown, monotonic),
        metrics=shown,
    )
    base = opened.base.fingerprint
    return Residency(shared.residency, shared.cluster, base, functions, parts, clock=monotonic, unix=time)


def _make_dispatcher(
    config: GatewayConfig, metrics: Metrics, opened: _Opened, functions: Functions, residency: Residency
) -> tuple[Dispatcher, Migration | None]:
    """Returns the dispatcher, and the migration of its generations if the policy migrates. Raises UnknownPolicy."""
    shared, fingerprint = opened.shared, opened.base.fingerprint
    breakers, policy = Breakers(monotonic, metrics.count_opened_circuit), make_policy(config.policy)
    watches = NodeWatches(shared.cluster, silence=config.node_silence, first_silence=config.record_expiry)
    accounting = Accounting(metrics=metrics)
    migration = Migration(shared.cluster, fingerprint, policy) if isinstance(policy, Migrates) else None
    dispatcher = Dispatcher(
        state=shared.cluster,
        router=Router(
            state=shared.cluster,
            policy=policy,
            policy_name=config.policy,
            base=fingerprint,
            breakers=breakers,
            metrics=metrics,
            loads=accounting.loads,
        ),
        client=NodeClient(opened.session, opened.secret, watches, connect=config.connect_seconds, breakers=breakers),
        hold=FirstNodeWait(shared.cluster, shared.leases, fingerprint, config.hold_seconds, monotonic),
        limits=shared.limits,
        functions=functions,
        accounting=accounting,
        called=CalledDigests(on_first=lambda tenant, digest: shared.peers.publish(DigestCalled(tenant, digest))),
        record_call=residency.record_call,
        generation=Generation if migration is None else migration.generation,
    )
    return dispatcher, migration


def _session() -> aiohttp.ClientSession:
    """Returns the HTTP session for all requests to nodes.

    It has no connection limit: placement limits each node's requests, and the boundary limits the gateway's.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
