"""Creates the gateway's parts when the application starts, and assigns them to the routes' groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time

from adapters.registry import Registry
from adapters.sources import Sources
from adapters.tenants import Tenants
from cluster.leases import Leases
from cluster.record_check import RecordRates
from cluster.text import BaseText
from gateway.background import background
from gateway.batches.runner import make_batches
from gateway.calls.accounting import Accounting
from gateway.calls.breaker import Breakers
from gateway.calls.dispatch import Dispatcher, Generation
from gateway.calls.late_nodes import LateNodes
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
from gateway.catalog.rate_limiter import RateLimiter
from gateway.catalog.store_probe import StoreProbe
from gateway.catalog.suggestions import Suggestions
from gateway.catalog.threads import LeavableThreads, StoreThreads
from gateway.changes import Changes
from gateway.config import GatewayConfig
from gateway.events.calls import EventCalls
from gateway.events.destinations import Destinations
from gateway.events.event_store import EventStore
from gateway.events.events import Events
from gateway.events.jobs import event_jobs
from gateway.events.metrics import EventMetrics
from gateway.groups import Admin, Calls, Catalog, Nodes
from gateway.jobs.host_clock import HostClock
from gateway.leader.leader import LEASE_SECONDS, Leader, worker_name
from gateway.leader.metrics import LeaderMetrics
from gateway.leader.store_leases import STORE_LEASE_SECONDS, StoreLeases
from gateway.leader.tick import Job
from gateway.opened import Opened, open_outside
from gateway.residency.history import CallHistory
from gateway.residency.metrics import ResidencyMetrics
from gateway.residency.orders import ResidencyOrders
from gateway.residency.remote_trainer import make_forecaster
from gateway.residency.residency import Parts, Residency
from gateway.residency.schedules import WarmSchedules
from gateway.residency.standing import StandingPolicies
from gateway.residency.warming import Warming
from gateway.scheduling.dlora import Migrates
from gateway.scheduling.policy import make_policy
from gateway.usage.compaction import UsageCompaction
from gateway.usage.residents import Owners, ResidentMeter
from gateway.workers.called import CalledDigests
from gateway.workers.metrics import Metrics
from gateway.workers.peers import DigestCalled
from gateway.workers.windows import Windows


@dataclass(frozen=True, kw_only=True)
class Services:
    """Groups of parts for the routes, the rate limits of all routes, and the suggestions for the boundary."""

    calls: Calls
    catalog: Catalog
    nodes: Nodes
    admin: Admin
    rate_limiter: RateLimiter
    suggestions: Suggestions


@dataclass(frozen=True, kw_only=True)
class _Records:
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


@dataclass(frozen=True, kw_only=True)
class _Traffic:
    """Parts that route calls to nodes, and prepare nodes for calls."""

    node_calls: NodeCalls
    late_nodes: LateNodes
    residency: Residency
    dispatcher: Dispatcher
    migration: Migration | None
    """Absent if the policy does not migrate generations."""
    windows: Windows
    warming: Warming
    changes: Changes

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the parts' tasks, and ends them in reverse order."""
        async with AsyncExitStack() as tasks:
            await tasks.enter_async_context(self.windows.running())
            if self.migration is not None:
                await tasks.enter_async_context(self.migration.running())
            await tasks.enter_async_context(self.warming.running())
            await tasks.enter_async_context(self.residency.running())
            yield


@asynccontextmanager
async def open_services(config: GatewayConfig, metrics: Metrics) -> AsyncIterator[Services]:
    """Makes the gateway's parts, runs their tasks, and yields the services.

    Everything opened is closed in reverse order at the end. Parts in this process's memory need no closing; threads
    that hang are abandoned. Raises the parts' exceptions for a missing file or an invalid setting, so that the gateway
    does not start.
    """
    async with open_outside(config, metrics) as opened:
        records = _make_records(opened)
        traffic = _make_traffic(opened, records)
        calls = _make_calls(opened, records, traffic)
        services = Services(
            calls=calls,
            catalog=_make_catalog(opened, records, traffic),
            nodes=_make_nodes(opened, records, traffic),
            admin=_make_admin(opened, records, traffic),
            rate_limiter=RateLimiter(records.callers, opened.shared.limits, metrics, config.call_body),
            suggestions=Suggestions(records.registry, records.threads, monotonic),
        )
        leader = _make_leader(opened, _jobs(opened, records, traffic.residency, calls.events))
        # Tasks start once all parts are connected, so that no change of a record is missed.
        async with (
            records.running(),
            background(HostClock(calls.events.clock, time).run),
            traffic.running(),
            leader.running(),
        ):
            yield services


def _make_records(opened: Opened) -> _Records:
    config, store, pools = opened.config, opened.store, opened.pools
    registry, tenants = Registry(store, opened.base, opened.inspector.inspect), Tenants(store)
    threads = StoreThreads(config.store_seconds, pools["store_writes"], pools["store_reads"])
    name_watch = NameWatch(store, threads, monotonic, config.cache_seconds)
    functions = Functions(config, registry, threads, monotonic, name_watch.confirmed, pools["rebuilds"])
    callers = Callers(config, tenants, threads, monotonic, name_watch.confirmed)
    return _Records(
        registry=registry,
        tenants=tenants,
        threads=threads,
        name_watch=name_watch,
        functions=functions,
        callers=callers,
        text=BaseText(Path(config.model_dir)),
        destinations=Destinations(
            functions=functions,
            callers=callers,
            base_id=opened.base.id,
            hosts=config.webhook_hosts,
            max_timeout=config.max_timeout,
        ),
    )


def _make_traffic(opened: Opened, records: _Records) -> _Traffic:
    """Makes the parts, and connects those that report changes to each other. Raises UnknownPolicy."""
    shared, base = opened.shared, opened.base.fingerprint
    node_calls = NodeCalls(opened.session, opened.secret, connect=opened.config.connect_seconds)
    late_nodes = LateNodes(shared.cluster, node_calls, base, monotonic)
    residency = _make_residency(opened, records, node_calls)
    dispatcher, migration = _make_dispatcher(opened, records.functions, residency, late_nodes)
    changes = Changes(
        store=opened.store,
        threads=records.threads,
        callers=records.callers,
        functions=records.functions,
        residency=residency,
        running=dispatcher.running,
        called=dispatcher.called,
        explanations=dispatcher.router.explanations,
        peers=shared.peers,
    )
    records.name_watch.on_mark, records.name_watch.forget_all = changes.read_mark, changes.forget_all
    shared.peers.on_message, records.functions.on_change = changes.receive, changes.function_changed
    residency.on_provisioned = dispatcher.called.run
    accounting = dispatcher.accounting
    return _Traffic(
        node_calls=node_calls,
        late_nodes=late_nodes,
        residency=residency,
        dispatcher=dispatcher,
        migration=migration,
        windows=Windows(shared.link, accounting.last_hour, accounting.attainment, accounting.loads),
        warming=Warming(shared.cluster, base, records.functions, node_calls, late_nodes, hold=residency.hold),
        changes=changes,
    )


def _make_calls(opened: Opened, records: _Records, traffic: _Traffic) -> Calls:
    config, store, shared, pools = opened.config, opened.store, opened.shared, opened.pools
    inputs = InputProcessor(
        base=opened.base,
        text=records.text,
        text_threads=LeavableThreads(pools["texts"]),
        templates=opened.templates,
        functions=records.functions,
        callers=records.callers,
        cluster=shared.cluster,
        request_timeout=config.request_timeout,
        max_timeout=config.max_timeout,
        count_usage=opened.usage.add,
    )
    events = Events(
        EventStore(store, EventMetrics(opened.metrics.registry)),
        StoreThreads(config.store_seconds, pools["event_writes"], pools["event_reads"]),
        shared.events,
        account_of=records.callers.account,
    )
    return Calls(
        config=config,
        inputs=inputs,
        dispatcher=traffic.dispatcher,
        events=events,
        event_calls=EventCalls(
            events=events,
            inputs=inputs,
            dispatcher=traffic.dispatcher,
            destinations=records.destinations,
            store=store,
            threads=records.threads,
            pools=pools,
        ),
        batches=make_batches(
            store,
            shared.cluster,
            records.callers,
            base=opened.base.fingerprint,
            name=worker_name(),
            registry=opened.metrics.registry,
            unix=events.clock.now,
            places=pools["batch_store"],
        ),
        callers=records.callers,
        pools=pools,
        registry=records.registry,
        threads=records.threads,
        peers=shared.peers,
    )


def _make_catalog(opened: Opened, records: _Records, traffic: _Traffic) -> Catalog:
    return Catalog(
        config=opened.config,
        base=opened.base,
        text=records.text,
        registry=records.registry,
        threads=records.threads,
        functions=records.functions,
        changes=traffic.changes,
        templates=opened.templates,
        pools=opened.pools,
        destinations=records.destinations,
        sources=Sources(opened.config.allowed_sources),
        source_threads=LeavableThreads(opened.pools["sources"]),
        deploy_threads=LeavableThreads(opened.pools["deploy_checks"], cut_off=False),
        cluster=opened.shared.cluster,
        called=traffic.dispatcher.called,
        windows=traffic.windows,
        warming=traffic.warming,
        residency=traffic.residency,
    )


def _make_nodes(opened: Opened, records: _Records, traffic: _Traffic) -> Nodes:
    config, name_watch = opened.config, records.name_watch
    return Nodes(
        config=config,
        base=opened.base,
        secret=opened.secret,
        cluster=opened.shared.cluster,
        node_calls=traffic.node_calls,
        record_rates=RecordRates(monotonic),
        breakers=traffic.dispatcher.router.breakers,
        hold=traffic.dispatcher.hold,
        late_nodes=traffic.late_nodes,
        leases=opened.shared.leases,
        windows=traffic.windows,
        metrics=opened.metrics,
        probe=StoreProbe(config, records.threads, opened.store, monotonic, lambda: name_watch.read_at),
        callers=records.callers,
        registry=records.registry,
        threads=records.threads,
    )


def _make_admin(opened: Opened, records: _Records, traffic: _Traffic) -> Admin:
    return Admin(
        config=opened.config,
        tenants=records.tenants,
        callers=records.callers,
        changes=traffic.changes,
        registry=records.registry,
        threads=records.threads,
        usage=opened.usage,
        windows=traffic.windows,
    )


def _jobs(opened: Opened, records: _Records, residency: Residency, events: Events) -> list[Job]:
    """Returns the jobs that the leader runs for all workers."""
    residents = ResidentMeter(
        opened.shared.cluster,
        records.registry,
        records.threads,
        residency.owners,
        pinned=residency.provisioned,
        count=opened.usage.add,
        clock=monotonic,
    )
    return [
        Job("usage_compaction", UsageCompaction(opened.store, monotonic).run),
        *residency.jobs(),
        residents.job(),
        *event_jobs(events.store, events.announce),
    ]


def _make_leader(opened: Opened, jobs: list[Job]) -> Leader:
    alone = opened.config.redis is None
    leases: Leases = StoreLeases(opened.store, monotonic) if alone else opened.shared.leases
    seconds = STORE_LEASE_SECONDS if alone else LEASE_SECONDS
    metrics = LeaderMetrics(opened.metrics.registry)
    return Leader(leases, worker_name(), jobs, metrics, monotonic, seconds, alone=alone)


def _make_residency(opened: Opened, records: _Records, node_calls: NodeCalls) -> Residency:
    store, threads, metrics = opened.store, records.threads, ResidencyMetrics(opened.metrics.registry)
    forecaster = partial(make_forecaster, opened.config.predictor, opened.trainer)
    parts = Parts(
        history=CallHistory(forecaster, monotonic, time),
        schedules=WarmSchedules(store, threads, records.functions, unix=time),
        standing=StandingPolicies(store, threads, records.functions),
        owners=Owners(),
        orders=ResidencyOrders(node_calls, metrics, monotonic),
        metrics=metrics,
    )
    shared, base = opened.shared, opened.base.fingerprint
    return Residency(shared.residency, shared.cluster, base, records.functions, parts, clock=monotonic, unix=time)


def _make_dispatcher(
    opened: Opened, functions: Functions, residency: Residency, late_nodes: LateNodes
) -> tuple[Dispatcher, Migration | None]:
    """Returns the dispatcher, and the migration of its generations if the policy migrates. Raises UnknownPolicy."""
    config, metrics, shared, fingerprint = opened.config, opened.metrics, opened.shared, opened.base.fingerprint
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
            late_nodes=late_nodes,
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
