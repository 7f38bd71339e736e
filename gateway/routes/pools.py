"""GET /pools: the demand of calls on the node pools. PUT /pools/autoscaler: the lease for setting their sizes.

Admin keys only.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.node_table import NodeTable
from cluster.redis_link import RedisAway
from gateway.calls.scale_from_zero import AUTOSCALER, autoscaler
from gateway.groups import Nodes
from gateway.http.bodies import read_message
from gateway.http.responses import json_response
from gateway.http.routing import Routes
from gateway.workers.pool_loads import PoolLoad

routes = Routes(Nodes)

RETRY_AFTER = 1.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Demand of calls over the last ten seconds. The work of a request is the node time that it takes, by the node's
    cost model."""

    open_requests: int
    queue_wait: float
    demand: float
    """Work that arrives per second: the number of nodes that it keeps busy."""
    backlog: float
    """Work of waiting requests, in seconds of one node's time."""
    attainment: float | None


class Pool(Load, frozen=True, kw_only=True):
    pool: str | None
    nodes: int
    ready: int


class PoolList(msgspec.Struct, frozen=True):
    pools: list[Pool]
    unplaced: Load
    """Load of requests that no node could take: they wait for a first node, or were refused because all were full."""
    workers: int
    stale: float | None
    """Seconds since the gateway's workers were last synchronized; null while they are synchronized."""
    autoscaler: str | None


class LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    holder: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,200}$", max_length=200)]
    seconds: Annotated[float, Meta(ge=0, le=300)]
    """Duration of the lease in seconds; 0 releases it."""


class LeaseReply(msgspec.Struct, frozen=True):
    holder: str | None
    seconds: float


@routes.admin("GET /pools", "What calls ask of the node pools now", {200: PoolList})
async def list_pools(_: Request, nodes: Nodes) -> Response:
    loads, workers = await nodes.windows.loads()
    table = await nodes.cluster.table()
    counted = Counter(table.record(row).pool for row in table.rows() if table.live[row])
    ready = Counter(table.record(row).pool for row in table.rows() if table.live[row] and table.ready[row])
    listed = [
        _pool(name, loads.get(name) or PoolLoad(name), counted[name], ready[name], _occupied(table, name))
        for name in sorted({*counted, *(name for name, load in loads.items() if name is not None and load.open)})
    ]
    reply = PoolList(
        pools=listed,
        unplaced=Load(**_fields(loads.get(None) or PoolLoad(None))),
        workers=workers,
        stale=nodes.cluster.stale,
        autoscaler=await autoscaler(nodes.leases),
    )
    return json_response(reply)


@routes.admin(
    "PUT /pools/autoscaler",
    "Take, prolong or give back the lease by which one autoscaler decides the pools' sizes",
    {200: LeaseReply},
    body=LeaseRequest,
)
async def lease_autoscaler(request: Request, nodes: Nodes) -> Response:
    body = await read_message(request, nodes.config, LeaseRequest)
    try:
        if body.seconds > 0:
            lease = await nodes.leases.take(AUTOSCALER, body.holder, body.seconds)
        else:
            await nodes.leases.free(AUTOSCALER, body.holder)
            lease = await nodes.leases.get(AUTOSCALER)
    except RedisAway as error:
        raise ServiceError(
            "unavailable", "the lease can't be acquired while the cluster state is unavailable", retry_after=RETRY_AFTER
        ) from error
    return json_response(LeaseReply(holder=lease.holder or None, seconds=round(lease.seconds, 3)))


def _pool(name: str, load: PoolLoad, nodes: int, ready: int, occupied: float) -> Pool:
    fields = _fields(load)
    fields["demand"] += occupied
    return Pool(pool=name or None, nodes=nodes, ready=ready, **fields)


def _fields(load: PoolLoad) -> dict[str, Any]:
    return {
        "open_requests": load.open,
        "queue_wait": round(load.queue_wait, 3),
        "demand": load.demand,
        "backlog": load.backlog,
        "attainment": load.attainment,
    }


def _occupied(nodes: NodeTable, pool: str) -> float:
    """Returns the number of nodes that the requests on the pool's nodes without a measured model occupy. A node counts
    as its requests divided by its rows."""
    rows = [row for row in nodes.rows() if nodes.live[row] and nodes.record(row).pool == pool]
    shares = [nodes.requests[row] / nodes.capacity[row] for row in rows if not nodes.modelled[row]]
    return float(np.sum(shares)) if shares else 0.0
