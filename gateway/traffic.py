"""Makes the parts that route calls to nodes and prepare nodes for calls, and connects them to each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, time

from gateway.calls.accounting import Accounting
from gateway.calls.breaker import Breakers
from gateway.calls.dispatch import Dispatcher, Generation
from gateway.calls.late_nodes import LateNodes
from gateway.calls.migration import Migration
from gateway.calls.node_calls import NodeCalls
from gateway.calls.node_client import NodeClient
from gateway.calls.node_watch import NodeWatches
from gateway.calls.routing import Router
from gateway.calls.scale_from_zero import FirstNodeWait
from gateway.catalog.functions import Functions
from gateway.changes import Changes
from gateway.opened import Opened
from gateway.records import Records
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
from gateway.usage.residents import Owners
from gateway.workers.called import CalledDigests
from gateway.workers.peers import DigestCalled
from gateway.workers.windows import Windows


@dataclass(frozen=True, kw_only=True)
class Traffic:
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


def make_traffic(opened: Opened, records: Records) -> Traffic:
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
    return Traffic(
        node_calls=node_calls,
        late_nodes=late_nodes,
        residency=residency,
        dispatcher=dispatcher,
        migration=migration,
        windows=Windows(shared.link, accounting.last_hour, accounting.attainment, accounting.loads),
        warming=Warming(shared.cluster, base, records.functions, node_calls, late_nodes, hold=residency.hold),
        changes=changes,
    )


def _make_residency(opened: Opened, records: Records, node_calls: NodeCalls) -> Residency:
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
    watches = NodeWatches(
        shared.cluster, silence=config.node_silence, first_silence=config.record_expiry, ask=late_nodes.ask
    )
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
