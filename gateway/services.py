"""Creates the gateway's parts when the application starts, and assigns them to the routes' groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, time

from adapters.sources import Sources
from cluster.leases import Leases
from cluster.record_check import RecordRates
from gateway.background import background
from gateway.batches.forms import check_form
from gateway.batches.runner import make_batches
from gateway.calls.request import InputProcessor
from gateway.catalog.rate_limiter import RateLimiter
from gateway.catalog.store_probe import StoreProbe
from gateway.catalog.suggestions import Suggestions
from gateway.catalog.threads import LeavableThreads, StoreThreads
from gateway.config import GatewayConfig
from gateway.events.calls import EventCalls
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
from gateway.records import Records, make_records
from gateway.residency.residency import Residency
from gateway.traffic import Traffic, make_traffic
from gateway.usage.compaction import UsageCompaction
from gateway.usage.residents import ResidentMeter
from gateway.workers.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Services:
    """Groups of parts for the routes, the rate limits of all routes, and the suggestions for the boundary."""

    calls: Calls
    catalog: Catalog
    nodes: Nodes
    admin: Admin
    rate_limiter: RateLimiter
    suggestions: Suggestions


@asynccontextmanager
async def open_services(config: GatewayConfig, metrics: Metrics) -> AsyncIterator[Services]:
    """Makes the gateway's parts, runs their tasks, and yields the services.

    Everything opened is closed in reverse order at the end. Parts in this process's memory need no closing; threads
    that hang are abandoned. Raises the parts' exceptions for a missing file or an invalid setting, so that the gateway
    does not start.
    """
    async with open_outside(config, metrics) as opened:
        records = make_records(opened)
        traffic = make_traffic(opened, records)
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


def _make_calls(opened: Opened, records: Records, traffic: Traffic) -> Calls:
    config, store, shared, pools = opened.config, opened.store, opened.shared, opened.pools
    text_threads = LeavableThreads(pools["texts"])
    inputs = InputProcessor(
        base=opened.base,
        text=records.text,
        text_threads=text_threads,
        grammars=opened.grammars,
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
            check_form=partial(check_form, inputs),
            places=pools["batch_store"],
        ),
        callers=records.callers,
        pools=pools,
        registry=records.registry,
        threads=records.threads,
        peers=shared.peers,
    )


def _make_catalog(opened: Opened, records: Records, traffic: Traffic) -> Catalog:
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


def _make_nodes(opened: Opened, records: Records, traffic: Traffic) -> Nodes:
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


def _make_admin(opened: Opened, records: Records, traffic: Traffic) -> Admin:
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


def _jobs(opened: Opened, records: Records, residency: Residency, events: Events) -> list[Job]:
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
