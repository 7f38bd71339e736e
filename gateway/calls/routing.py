"""Routes an invocation's generations to nodes and logs each decision."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cluster.errors import ServiceError
from cluster.messages import GenerateRequest
from cluster.node_table import Demand, NodeTable
from cluster.queue_shares import QueueShares
from cluster.state import ClusterState
from gateway.calls.breaker import Breakers
from gateway.calls.explanations import CallKey, Explanations, RoutingRecord
from gateway.calls.late_nodes import LateNodes
from gateway.scheduling.decision import Outcome
from gateway.scheduling.lengths import ResponseLengths
from gateway.scheduling.policy import Policy
from gateway.scheduling.request import RoutingRequest
from gateway.scheduling.route import Route, Trace, eligible_nodes, reserve_route
from gateway.scheduling.work import work
from gateway.workers.metrics import Metrics
from gateway.workers.pool_loads import PoolLoads

MIN_TTFT_S = 1e-3
"""Minimum remaining TTFT target in seconds, used once the target has passed."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """Router of one gateway worker, for one base model."""

    state: ClusterState
    policy: Policy
    policy_name: str
    base: str
    breakers: Breakers
    late_nodes: LateNodes
    metrics: Metrics
    loads: PoolLoads
    explanations: Explanations = field(default_factory=Explanations)
    lengths: ResponseLengths = field(default_factory=ResponseLengths)
    queued: QueueShares = field(default_factory=QueueShares)
    """Counts, by tenant, of the requests that are routed to a node but have not started there."""

    async def route(
        self,
        call: CallKey,
        request: GenerateRequest,
        generated: int | None,
        received: float,
        excluded: frozenset[str],
        *,
        displaces: bool = False,
        counts_refusal: bool = False,
    ) -> Route:
        """Reserves a place on a node that is not excluded, logs the decision, and returns the route. Raises
        ServiceError.

        `generated`: number of tokens received from earlier nodes; None before the first token. `received`: monotonic
        seconds from which the TTFT target counts. `displaces`: True if the request may take another request's place in
        a full queue. `counts_refusal`: True if a refusal because of full queues counts as unmet demand of the pools.
        """
        nodes = await self.state.table()
        excluded |= self.breakers.blocked(nodes)
        routing_request = self._routing_request(call, request, generated, received, displaces)
        began, at, trace = time.monotonic(), time.time(), Trace()
        outcome: Outcome = "routed"
        node: str | None = None
        try:
            route = await self._reserve(routing_request, excluded, trace, received + request.timeout)
            node = route.node_id
            return route
        except ServiceError as error:
            outcome = "unavailable" if error.type == "unavailable" else "overloaded"
            if counts_refusal and error.type == "overloaded":
                self.loads.count_refused(self._refused_work(await self.state.table(), routing_request))
            raise
        finally:
            took = time.monotonic() - began
            self.metrics.observe_schedule(took)
            excluded_ids = tuple(sorted(excluded))
            self.explanations.keep(
                call,
                RoutingRecord(
                    routing_request,
                    outcome,
                    node,
                    self.policy_name,
                    at,
                    took,
                    trace.tries,
                    excluded_ids,
                    trace.snapshot,
                ),
            )

    async def _reserve(self, request: RoutingRequest, excluded: frozenset[str], trace: Trace, deadline: float) -> Route:
        """Reserves a place on a node and returns the route. If no node is ready, asks the nodes whose record is late,
        until `deadline` (monotonic seconds) at most. Raises ServiceError."""
        try:
            return await reserve_route(self.state, self.policy, self.base, request, excluded, trace)
        except ServiceError as error:
            if error.type != "unavailable" or not await self.late_nodes.find(excluded, deadline - time.monotonic()):
                raise
        return await reserve_route(self.state, self.policy, self.base, request, excluded, trace)

    def displaces(self, request: GenerateRequest) -> bool:
        """Returns whether the request may take another request's place in a full queue. Nodes use the same rule."""
        crowded = self.queued.tenant_to_displace(request.tenant, request.weight)
        return crowded is not None or request.slo_class == "strict" or request.reserved > 0

    def _refused_work(self, nodes: NodeTable, request: RoutingRequest) -> float | None:
        """Returns the node time, in seconds, that a refused request would take.

        Returns None if no node could serve it, or if that node has no measured performance model.
        """
        rows = eligible_nodes(nodes, self.base, request, frozenset())
        return work(nodes, int(rows[0]), request) if rows.size else None

    def _routing_request(
        self, call: CallKey, request: GenerateRequest, generated: int | None, received: float, displaces: bool
    ) -> RoutingRequest:
        adapter, lengths, count = request.adapter, self.lengths, generated or 0
        max_tokens = max(1, request.max_tokens - count)
        expected = lengths.expected(call.tenant, call.function, max_tokens)
        return RoutingRequest(
            id=request.id,
            demand=Demand(
                rank=adapter.max_rank if adapter else 0,
                prompt_tokens=len(request.token_ids) + count,  # the next node computes them as part of the prompt
                max_tokens=max_tokens,
                tpot=request.tpot,
                displaces=displaces,
                slo_class=request.slo_class,
            ),
            digest=adapter.digest if adapter else None,
            adapter_bytes=adapter.bytes if adapter else 0,
            adapter_itemsize=adapter.itemsize if adapter else 0,
            expected_tokens=expected,
            expected_inverse=lengths.inverse(expected),
            typical_tokens=lengths.typical(),
            ttft=None if generated is not None else ttft_left(request, received),
        )


def ttft_left(request: GenerateRequest, received: float) -> float | None:
    """Returns the remaining seconds of the TTFT target, at least MIN_TTFT_S; None without a target.

    `received`: monotonic seconds.
    """
    return None if request.ttft is None else max(request.ttft - (time.monotonic() - received), MIN_TTFT_S)
