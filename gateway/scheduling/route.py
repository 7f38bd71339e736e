"""Routes a request to a node: filters the eligible nodes, asks the policy, and reserves a place."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from cluster.errors import ServiceError
from cluster.node_table import NodeTable
from cluster.state import ClusterState
from gateway.scheduling.cost import Scores, ScoringPolicy
from gateway.scheduling.decision import Snapshot, take_snapshot
from gateway.scheduling.policy import Policy
from gateway.scheduling.request import RoutingRequest
from gateway.scheduling.work import work

RETRY_AFTER = 1.0
"""Default Retry-After in seconds. After that time a place may be free, or a node may have started."""
ATTEMPTS = 4
"""Maximum attempts to route one request. An attempt fails if other requests take the place or change the node first."""


class Route(msgspec.Struct, frozen=True):
    """Process of a node where a place is reserved under the request's id."""

    node_id: str
    epoch: str
    url: str
    forecast: float | None = None
    """Forecast seconds from the reservation to the first token; None if the policy or the node has no forecast."""
    pool: str = ""
    work: float | None = None
    """Node time that the request takes, in seconds (gateway.scheduling.work); None if the node has no measured
    model."""
    number: int = 0
    """Number of the reservation. The node's records include it once the request has arrived there."""


class Trace(msgspec.Struct):
    """Record of how one request was routed, for `/explain`."""

    tries: int = 0
    snapshot: Snapshot | None = None


async def reserve_route(
    state: ClusterState,
    policy: Policy,
    base: str,
    request: RoutingRequest,
    excluded: frozenset[str] = frozenset(),
    trace: Trace | None = None,
) -> Route:
    """Reserves a place for the request on a node and returns the route. Fills `trace`.

    Raises ServiceError: `unavailable` if no node can serve the request, `overloaded` if all are full or the policy
    refuses them.
    """
    demand = request.demand
    for attempt in range(ATTEMPTS):
        nodes = await state.table()
        serving = eligible_nodes(nodes, base, request, excluded)
        if not serving.size:
            raise ServiceError("unavailable", why_none(nodes, base, demand.rank), retry_after=RETRY_AFTER)
        free = serving[~nodes.full[serving]]
        if not free.size and demand.displaces:
            free = serving[~nodes.crammed[serving]]
        if not free.size:
            break
        row = policy.choose(nodes, free, request)
        scores = policy.last if isinstance(policy, ScoringPolicy) else None
        if trace is not None:
            trace.tries, trace.snapshot = attempt + 1, take_snapshot(nodes, free, request, row, scores)
        if row is None:
            raise _refusal(scores)
        record = nodes.record(row)
        # The node's generation is checked only if another attempt could end differently: on another node or, for strict
        # requests, in a refusal. The last attempt takes the place if it is still free.
        looks_again = attempt < ATTEMPTS - 1 and (free.size > 1 or demand.slo_class == "strict")
        generation = int(nodes.generation[row]) if looks_again else None
        number = await state.reserve(record.id, request.id, demand, generation)
        if number is not None:
            forecast, needs = _forecast(scores, nodes, row), work(nodes, row, request)
            return Route(record.id, record.epoch, record.url, forecast, record.pool, needs, number)
    raise ServiceError("overloaded", "every node's queue is full; try again later", retry_after=RETRY_AFTER)


def eligible_nodes(nodes: NodeTable, base: str, request: RoutingRequest, excluded: frozenset[str]) -> np.ndarray:
    """Returns i64[C]: the ascending rows of the nodes that could serve the request if they had a free place.

    The array must not be modified.
    """
    serving = nodes.serving(base)
    rows, needed = serving.taking(nodes, request.demand.rank), request.demand.prompt_tokens + request.demand.max_tokens
    if needed > serving.shortest:
        rows = rows[nodes.max_context[rows] >= needed]
    if excluded:
        rows = rows[[nodes.ids[row] not in excluded for row in rows.tolist()]]
    return rows


def why_none(nodes: NodeTable, base: str, rank: int) -> str:
    """Returns why no node can serve a request with an adapter of this rank."""
    serving = nodes.serving(base)
    if not serving.rows.size or serving.taking(nodes, rank).size:
        return "no node is ready to serve this model"
    return (
        f"no node is ready to serve an adapter of rank {rank}: the nodes that are ready take ranks up to "
        f"{int(nodes.rank_limit[serving.rows].max())} (node.vllm.max_lora_rank)"
    )


def _forecast(scores: Scores | None, nodes: NodeTable, row: int) -> float | None:
    if scores is None or not nodes.modelled[row]:
        return None
    value = float(scores.terms.ttft[scores.terms.candidates.searchsorted(row)])
    return value if math.isfinite(value) else None


def _refusal(scores: Scores | None) -> ServiceError:
    return ServiceError(
        "overloaded",
        "no node can keep what is promised for this call; try again later",
        retry_after=scores.retry_after if scores and scores.retry_after else RETRY_AFTER,
    )
