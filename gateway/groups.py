"""Groups of the gateway's parts. The handlers of each route module get one of the four groups, depending on the routes'
subject.

The parts are imported for type checking only, because the command line imports the routes' messages without the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapters.base_model import BaseModel
    from adapters.registry import Registry
    from adapters.sources import Sources
    from adapters.tenants import Tenants
    from cluster.leases import Leases
    from cluster.record_check import RecordRates
    from cluster.state import ClusterState
    from cluster.text import BaseText
    from gateway.batches.runner import Batches
    from gateway.calls.breaker import Breakers
    from gateway.calls.chat_templates import ChatTemplates
    from gateway.calls.dispatch import Dispatcher
    from gateway.calls.late_nodes import LateNodes
    from gateway.calls.node_calls import NodeCalls
    from gateway.calls.request import InputProcessor
    from gateway.calls.scale_from_zero import FirstNodeWait
    from gateway.catalog.callers import Callers
    from gateway.catalog.functions import Functions
    from gateway.catalog.store_probe import StoreProbe
    from gateway.catalog.threads import LeavableThreads, StoreThreads
    from gateway.changes import Changes
    from gateway.config import GatewayConfig
    from gateway.events.calls import EventCalls
    from gateway.events.destinations import Destinations
    from gateway.events.events import Events
    from gateway.places.pools import Pools
    from gateway.residency.residency import Residency
    from gateway.residency.warming import Warming
    from gateway.usage.ledger import UsageLedger
    from gateway.workers.called import CalledDigests
    from gateway.workers.metrics import Metrics
    from gateway.workers.peers import Peers
    from gateway.workers.windows import Windows


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Parts for routes that call functions: synchronously, asynchronously, in batches, or to explain a call's
    routing."""

    config: GatewayConfig
    inputs: InputProcessor
    dispatcher: Dispatcher
    events: Events
    event_calls: EventCalls
    batches: Batches
    callers: Callers
    pools: Pools
    registry: Registry
    threads: StoreThreads
    peers: Peers


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Parts for routes that show and change functions."""

    config: GatewayConfig
    base: BaseModel
    text: BaseText
    registry: Registry
    threads: StoreThreads
    functions: Functions
    changes: Changes
    templates: ChatTemplates
    destinations: Destinations
    pools: Pools
    sources: Sources
    source_threads: LeavableThreads
    deploy_threads: LeavableThreads
    cluster: ClusterState
    called: CalledDigests
    windows: Windows
    warming: Warming
    residency: Residency


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Parts for routes about nodes, their pools, and the gateway's readiness."""

    config: GatewayConfig
    base: BaseModel
    secret: str
    cluster: ClusterState
    node_calls: NodeCalls
    record_rates: RecordRates
    breakers: Breakers
    hold: FirstNodeWait
    late_nodes: LateNodes
    leases: Leases
    windows: Windows
    metrics: Metrics
    probe: StoreProbe
    callers: Callers
    registry: Registry
    threads: StoreThreads


@dataclass(frozen=True, kw_only=True)
class Admin:
    """Parts for routes about tenants, their keys and secrets, and their usage."""

    config: GatewayConfig
    tenants: Tenants
    callers: Callers
    changes: Changes
    registry: Registry
    threads: StoreThreads
    usage: UsageLedger
    windows: Windows
