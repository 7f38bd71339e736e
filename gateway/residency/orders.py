"""Sends nodes orders, which list the adapters that they must have ready. An order is sent when its content changes, and
before the previous one expires.

Nodes that do not answer hold up no order to others: nodes that took their last order go first, and those that failed
have a few places of their own and a limited time in each tick.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cluster.errors import ServiceError
from cluster.news import NodeRecord
from cluster.residency import WantedAdapter, WantedResidency
from cluster.state import MAX_NODES
from gateway.calls.node_calls import NodeCalls
from gateway.leader.tick import Tick, TickEnded
from gateway.places.places import SERVICE, Places, Pool
from gateway.residency.metrics import ResidencyMetrics

ORDER_SECONDS = 20.0
"""Seconds for which an order is valid: longer than a killed leader's replacement takes."""
ANSWER_SECONDS = 2.0
AT_ONCE, FAILING_AT_ONCE = 16, 4
"""Maximum orders under way at once: in all, and to nodes that failed to take their last order."""
POOL = Pool(name="node_orders", work="orders to nodes", size=AT_ONCE, per_tenant=FAILING_AT_ONCE, waiting=MAX_NODES)
FAILING = "failing nodes"
"""Owner of the places of all nodes that failed to take their last order."""

log = logging.getLogger("gateway")


class NodeOrder(NamedTuple):
    """Order to one node: the adapters to have ready, and the seconds for which it keeps idle adapters."""

    adapters: tuple[WantedAdapter, ...] = ()
    """Adapters, most important first."""
    idle_ttls: Mapping[str, float] = {}
    """Seconds without a call after which the node evicts an adapter, by digest."""


NOTHING = NodeOrder()


class _Sent(NamedTuple):
    epoch: str
    order: NodeOrder
    at: float
    """Time at which the order was sent, in monotonic seconds."""


class ResidencyOrders:
    """Sends the leader's orders. `clock`: monotonic seconds."""

    def __init__(self, node_calls: NodeCalls, metrics: ResidencyMetrics, clock: Callable[[], float]) -> None:
        self._node_calls, self._metrics, self._clock = node_calls, metrics, clock
        self._latest_sent: dict[str, _Sent] = {}
        self._failing: dict[str, None] = {}
        """Nodes that failed to take their last order, by node id. The one that was tried last is at the end."""
        self._places = Places(POOL)

    async def send(self, tick: Tick, nodes: Sequence[NodeRecord], orders: Mapping[str, NodeOrder]) -> None:
        """Sends each node its order if the order has changed or will expire soon. Failing nodes are tried for
        ANSWER_SECONDS; the next tick tries the remaining ones first. Raises TickEnded; the next tick then sends the
        remaining orders."""
        ids = {node.id for node in nodes}
        self._latest_sent = {id: sent for id, sent in self._latest_sent.items() if id in ids}
        self._failing = {id: None for id in self._failing if id in ids}
        scheduled = {node.id: node for node in nodes if self._is_due(node, orders.get(node.id, NOTHING))}
        answering = sorted((node for node in scheduled.values() if node.id not in self._failing), key=self._is_unknown)
        failing, until = [scheduled[id] for id in self._failing if id in scheduled], self._clock() + ANSWER_SECONDS

        async def order(node: NodeRecord) -> None:
            async with self._places.hold(SERVICE):
                await self._order(tick, node, orders.get(node.id, NOTHING))

        async def order_failing(node: NodeRecord) -> None:
            async with self._places.hold(FAILING):
                if self._clock() <= until:
                    await self._order(tick, node, orders.get(node.id, NOTHING))

        async with asyncio.TaskGroup() as tasks:
            for node in answering:
                tasks.create_task(order(node))
            for node in failing:
                tasks.create_task(order_failing(node))
        tick.check()

    def _is_unknown(self, node: NodeRecord) -> bool:
        """Returns whether the node has never taken an order, so that it may not answer."""
        return node.id not in self._latest_sent

    def _is_due(self, node: NodeRecord, order: NodeOrder) -> bool:
        sent = self._latest_sent.get(node.id)
        if sent is None or sent.epoch != node.epoch:
            return order != NOTHING
        return sent.order != order or (order != NOTHING and self._clock() - sent.at >= ORDER_SECONDS / 2)

    async def _order(self, tick: Tick, node: NodeRecord, order: NodeOrder) -> None:
        at, message = self._clock(), WantedResidency(list(order.adapters), ORDER_SECONDS, dict(order.idle_ttls))
        try:
            tick.check()
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._node_calls.order(node, "/adapters/wanted", message)
        except TickEnded:
            return
        except (ServiceError, TimeoutError) as error:
            self._record_failure(node, error)
            return
        tick.work += 1
        self._metrics.count_order("taken")
        self._failing.pop(node.id, None)
        self._latest_sent[node.id] = _Sent(node.epoch, order, at)

    def _record_failure(self, node: NodeRecord, error: Exception) -> None:
        """Forgets which order the node last received, so that the next tick sends the order again."""
        self._metrics.count_order("failed")
        self._latest_sent.pop(node.id, None)
        if node.id not in self._failing:
            why = str(error) or "no answer in time"
            log.warning(
                "the order to have adapters ready could not be sent to a node", extra={"node": node.id, "why": why}
            )
        self._failing.pop(node.id, None)
        self._failing[node.id] = None
