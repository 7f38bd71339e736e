"""Everything that the routes share, made once in the lifespan."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, time

import aiohttp
import msgspec

from adapters.base_model import BaseModel, load_base_model
from adapters.epoch import Mark, mark
from adapters.errors import StoreUnavailable
from adapters.inspector import Inspector
from adapters.open_store import open_checked_store
from adapters.registry import Registry
from adapters.sources import Sources
from adapters.standing import Memory, function_key
from adapters.store import ObjectStore
from adapters.tenants import Tenants
from cluster.errors import ServiceError
from cluster.leases import Leases
from cluster.record_check import RecordRates
from cluster.secret import read_secret
from cluster.state import ClusterState
from cluster.text import BaseText
from gateway.batches.batches import Batches, make_batches
from gateway.calls.breaker import Breakers
from gateway.calls.chat_templates import ChatTemplates
from gateway.calls.dispatch import Dispatcher
from gateway.calls.holding import Hold
from gateway.calls.migration import Migration
from gateway.calls.node_calls import NodeCalls
from gateway.calls.node_client import NodeClient
from gateway.calls.node_watch import NodeWatches
from gateway.calls.placing import Placer
from gateway.catalog.callers import Callers
from gateway.catalog.deploy_slots import DeploySlots
from gateway.catalog.functions import Functions
from gateway.catalog.name_watch import NameWatch
from gateway.catalog.store_probe import StoreProbe
from gateway.catalog.suggestions import Suggestions
from gateway.catalog.threads import WRITE_THREADS, LeavableThreads, StoreThreads
from gateway.config import GatewayConfig, usage_directory
from gateway.events.event_store import EventStore
from gateway.events.events import Events
from gateway.events.jobs import event_jobs
from gateway.events.metrics import EventMetrics
from gateway.leader.leader import LEASE_SECONDS, Leader, worker_name
from gateway.leader.metrics import LeaderMetrics
from gateway.leader.store_leases import STORE_LEASE_SECONDS, StoreLeases
from gateway.leader.turn import Job
from gateway.residency.history import CallHistory
from gateway.residency.metrics import ResidencyMetrics
from gateway.residency.orders import ResidencyOrders
from gateway.residency.remote_trainer import RemoteTrainer, make_forecaster
from gateway.residency.residency import Parts, Residency
from gateway.residency.schedules import WarmSchedules
from gateway.residency.standing import StandingPolicies, memory_of
from gateway.residency.warming import Warming
from gateway.usage.compaction import UsageCompaction
from gateway.usage.ledger import UsageLedger, open_ledger
from gateway.usage.residents import Owners, meter_of
from gateway.workers.called import CalledDigests
from gateway.workers.metrics import Metrics
from gateway.workers.peers import (
    CallsRevoked,
    DigestCalled,
    ExplanationAnswered,
    ExplanationAsked,
    FunctionChanged,
    Message,
    Peers,
    TenantChanged,
)
from gateway.workers.shared_state import Shared, open_shared
from gateway.workers.windows import Windows

TEXT_THREADS = 2
SOURCE_THREADS = 4
EVENT_THREADS = 8
"""Writes of asynchronous calls at once."""
CLOCK_SECONDS = 60.0
"""By which this host's clock may differ from the store's without a word."""

log = logging.getLogger("gateway")


@dataclass(frozen=True)
class Services:
    config: GatewayConfig
    base: BaseModel
    text: BaseText
    text_threads: LeavableThreads
    templates: ChatTemplates
    registry: Registry
    threads: StoreThreads
    probe: StoreProbe
    tenants: Tenants
    callers: Callers
    name_watch: NameWatch
    usage: UsageLedger
    functions: Functions
    events: Events
    suggestions: Suggestions
    cluster: ClusterState
    leases: Leases
    windows: Windows
    peers: Peers
    record_rates: RecordRates
    secret: str
    dispatcher: Dispatcher
    node_calls: NodeCalls
    metrics: Metrics
    residency: Residency
    warming: Warming
    deploys: DeploySlots
    sources: Sources
    source_threads: LeavableThreads
    batches: Batches

    def tenant_changed(self, tenant: str) -> None:
        """Forgets what is cached of the tenant, after any change of it, its keys included."""
        self._forget_tenant(tenant)
        self.peers.publish(TenantChanged(tenant))

    def function_changed(self, tenant: str, function: str) -> None:
        """Forgets what is cached of the function, after any change of it by this process."""
        self.callers.forget(tenant)  # its record has what functions reserve
        self.residency.forget(tenant, function)
        self.peers.publish(FunctionChanged(tenant, function))

    async def revoke(self, tenant: str, function: str, why: str) -> None:
        """End the function's generations, on all workers. Those that Redis does not reach read it in the registry's
        epoch within a second."""
        number = secrets.token_hex(8)
        self._end_calls(tenant, function, why, number)
        self.peers.publish(CallsRevoked(tenant, function, why, number))
        try:
            await self.threads.write(mark, self.registry.store, function_key(tenant, function), why, number)
        except StoreUnavailable as error:
            log.error("calls of a deleted function may go on where Redis is away, too", extra={"why": str(error)})

    async def provisionable(self) -> Memory:
        """Returns what of the nodes' memory provisioned copies may take."""
        return memory_of((node.record for node in await self.cluster.nodes()), self.base.fingerprint)

    def marked(self, mark: Mark) -> None:
        """The registry's epoch says that this record may have changed."""
        match mark.key.split("/"):
            case ["tenants", tenant, "functions", name, _]:
                self.functions.forget(tenant, name)
                self.residency.forget(tenant, name)
                if mark.ended:
                    self._end_calls(tenant, name, mark.ended, mark.id)
            case ["tenants", tenant, _]:
                self._forget_tenant(tenant)
            case _:
                self.callers.forget(None)

    def forget_all(self) -> None:
        """More may have changed than the registry's epoch tells."""
        self.functions.forget_all()
        self.callers.forget_all()

    def _end_calls(self, tenant: str, function: str, why: str, number: str) -> None:
        self.dispatcher.running.revoke(tenant, function, ServiceError("cancelled", why), number)

    def heard(self, message: Message) -> None:
        """Another worker has published this."""
        match message:
            case FunctionChanged(tenant, function):
                self.functions.forget(tenant, function)
                self.callers.forget(tenant)
                self.residency.forget(tenant, function)
            case TenantChanged(tenant):
                self._forget_tenant(tenant)
            case CallsRevoked(tenant, function, why, number):
                self._end_calls(tenant, function, why, number)
            case DigestCalled(tenant, digest):
                self.dispatcher.called.note(tenant, digest)
            case ExplanationAsked(number, call, whose):
                found = self.dispatcher.placer.explanations.find(call, whose)
                if found is not None:
                    self.peers.publish(ExplanationAnswered(number, msgspec.json.encode(found.reply())))
            case ExplanationAnswered(number, reply):
                self.peers.answer(number, reply)

    def _forget_tenant(self, tenant: str) -> None:
        self.callers.forget(tenant)
        self.functions.forget_tenant(tenant)


def _compare_clocks(store: ObjectStore) -> None:
    """Raises StoreUnavailable."""
    ahead = time() - store.now()
    if abs(ahead) > CLOCK_SECONDS:
        log.warning("this host's clock is %+.0f s from the registry's: usage is counted in other hours", ahead)


@dataclass(frozen=True)
class _Opened:
    """What of the services is not made here, but lies in files, in the store, or with other processes."""

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
    """Opens the ledger, the connections to the nodes and what the workers share, and closes them in the reverse order
    when the context ends. All else is this process's memory and needs no closing: threads that hang are left.

    Raises what the parts raise when a file is missing or a setting is wrong: the gateway does not start then.
    """
    base = load_base_model(Path(config.model_dir), config.base_id)
    store = await asyncio.to_thread(open_checked_store, config.registry)
    await asyncio.to_thread(_compare_clocks, store)
    secret = read_secret(Path(config.secret_file))
    with (
        closing(Inspector(base)) as inspector,
        closing(ChatTemplates()) as templates,
        closing(RemoteTrainer()) as trainer,
    ):
        async with (
            open_ledger(usage_directory(config), store) as usage,
            _session() as session,
            open_shared(config, secret) as shared,
        ):
            opened = _Opened(base, inspector, templates, trainer, store, secret, usage, session, shared)
            services = _make_services(config, metrics, opened)
            services.name_watch.on_mark, services.name_watch.forget_all = services.marked, services.forget_all
            services.peers.on_message, services.functions.on_change = services.heard, services.function_changed
            services.residency.on_provisioned = services.dispatcher.called.run
            await services.callers.learn_tenants()
            leader = _leader(config, metrics, shared, services)
            async with (
                services.name_watch.running(),
                services.windows.running(),
                services.dispatcher.migration.running(),
                services.warming.running(),
                services.residency.running(),
                leader.running(),
            ):
                yield services


def _leader(config: GatewayConfig, metrics: Metrics, shared: Shared, services: Services) -> Leader:
    alone, store, events = config.redis is None, services.registry.store, services.events
    leases: Leases = StoreLeases(store, monotonic) if alone else shared.leases
    seconds = STORE_LEASE_SECONDS if alone else LEASE_SECONDS
    jobs = [
        Job("usage_compaction", UsageCompaction(store, monotonic).run),
        *services.residency.jobs(),
        meter_of(services).job(),
        *event_jobs(events.store, events.announce),
    ]
    return Leader(leases, worker_name(), jobs, LeaderMetrics(metrics.registry), monotonic, seconds, alone=alone)


def _make_services(config: GatewayConfig, metrics: Metrics, opened: _Opened) -> Services:
    shared, store = opened.shared, opened.store
    registry, tenants = Registry(store, opened.base, opened.inspector.inspect), Tenants(store)
    # Deploys take long: however many there are, a rollback finds a thread.
    threads = StoreThreads(config.store_seconds, config.max_deploys + WRITE_THREADS)
    name_watch = NameWatch(store, threads, monotonic, config.cache_seconds)
    functions = Functions(config, registry, threads, monotonic, name_watch.confirmed)
    node_calls = NodeCalls(opened.session, opened.secret, connect=config.connect_seconds)
    residency = _make_residency(config, opened, metrics, functions, threads, node_calls)
    dispatcher = _make_dispatcher(config, metrics, opened, functions, residency)
    callers = Callers(config, tenants, threads, monotonic, name_watch.confirmed)
    event_threads = StoreThreads(config.store_seconds, EVENT_THREADS)
    events = Events(EventStore(store, EventMetrics(metrics.registry)), event_threads, shared.events)
    return Services(
        config=config,
        base=opened.base,
        text=BaseText(Path(config.model_dir)),
        text_threads=LeavableThreads(TEXT_THREADS),
        templates=opened.templates,
        registry=registry,
        threads=threads,
        probe=StoreProbe(config, threads, store, monotonic, lambda: name_watch.read_at),
        tenants=tenants,
        callers=callers,
        name_watch=name_watch,
        usage=opened.usage,
        functions=functions,
        events=events,
        suggestions=Suggestions(registry, threads, monotonic),
        cluster=shared.cluster,
        leases=shared.leases,
        windows=Windows(shared.link, dispatcher.last_hour, dispatcher.attainment, dispatcher.loads),
        peers=shared.peers,
        record_rates=RecordRates(monotonic),
        secret=opened.secret,
        dispatcher=dispatcher,
        node_calls=node_calls,
        metrics=metrics,
        residency=residency,
        warming=Warming(shared.cluster, opened.base.fingerprint, functions, node_calls, hold=residency.hold),
        deploys=DeploySlots(config),
        sources=Sources(config.allowed_sources),
        source_threads=LeavableThreads(SOURCE_THREADS),
        batches=make_batches(
            store,
            shared.cluster,
            callers,
            base=opened.base.fingerprint,
            name=worker_name(),
            registry=metrics.registry,
            unix=events.clock.now,
        ),
    )


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
) -> Dispatcher:
    shared, fingerprint = opened.shared, opened.base.fingerprint
    placer = Placer(shared.cluster, config.policy, fingerprint, metrics)
    watches = NodeWatches(shared.cluster, silence=config.node_silence, first_silence=config.record_expiry)
    breakers = Breakers(monotonic, metrics.count_opened_circuit)
    return Dispatcher(
        state=shared.cluster,
        placer=placer,
        client=NodeClient(opened.session, opened.secret, watches, connect=config.connect_seconds, breakers=breakers),
        migration=Migration(shared.cluster, fingerprint, placer.policy),
        hold=Hold(shared.cluster, shared.leases, fingerprint, config.hold_seconds, monotonic),
        limits=shared.limits,
        functions=functions,
        residency=residency,
        metrics=metrics,
        called=CalledDigests(on_first=lambda tenant, digest: shared.peers.publish(DigestCalled(tenant, digest))),
    )


def _session() -> aiohttp.ClientSession:
    """Makes the HTTP session for all requests to nodes. It sets no limit: placement bounds what each node gets, and the
    boundary what the gateway takes."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
