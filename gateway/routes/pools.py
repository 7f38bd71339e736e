"""GET /pools: what calls ask of the node pools; PUT /pools/autoscaler: who may decide their sizes. Admin keys only."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.leases import Lease
from cluster.node_table import NodeTable
from cluster.redis_link import RedisAway
from gateway.api import pool_schema as schema
from gateway.calls.holding import AUTOSCALER
from gateway.http.bodies import decode_json, read_body, require_json
from gateway.http.params import known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.services import Services, services_of
from gateway.workers.pool_loads import PoolLoad

RETRY_AFTER = 1.0


async def pools(request: Request) -> Response:
    services = await _admin(request)
    loads, workers = await services.windows.loads()
    nodes = await services.cluster.table()
    counted = Counter(nodes.record(row).pool for row in nodes.rows() if nodes.live[row])
    ready = Counter(nodes.record(row).pool for row in nodes.rows() if nodes.live[row] and nodes.ready[row])
    listed = [
        _pool(name, loads.get(name) or PoolLoad(name), counted[name], ready[name], _occupied(nodes, name))
        for name in sorted({*counted, *(name for name, load in loads.items() if name is not None and load.open)})
    ]
    reply = schema.PoolList(
        pools=listed,
        unplaced=schema.Load(**_fields(loads.get(None) or PoolLoad(None))),
        workers=workers,
        stale=services.cluster.stale,
        autoscaler=await _holder(services),
    )
    return json_response(reply)


async def lease(request: Request) -> Response:
    services = await _admin(request)
    require_json(request)
    config = services.config
    body = await read_body(request, config.call_body, config.body_seconds, config.body_idle_seconds)
    asked = decode_json(body, schema.LeaseRequest)
    try:
        if asked.seconds > 0:
            held = await services.leases.take(AUTOSCALER, asked.holder, asked.seconds)
        else:
            await services.leases.free(AUTOSCALER, asked.holder)
            held = await services.leases.look(AUTOSCALER)
    except RedisAway as error:
        raise ServiceError(
            "unavailable", "the lease can't be had while the cluster state is away", retry_after=RETRY_AFTER
        ) from error
    return json_response(_lease(held))


async def _admin(request: Request) -> Services:
    services = services_of(request)
    await services.callers.admin(request)
    known_only(request)
    return services


async def _holder(services: Services) -> str | None:
    try:
        return (await services.leases.look(AUTOSCALER)).holder or None
    except RedisAway:
        return None


def _lease(held: Lease) -> schema.LeaseReply:
    return schema.LeaseReply(holder=held.holder or None, seconds=round(held.seconds, 3))


def _pool(name: str, load: PoolLoad, nodes: int, ready: int, occupied: float) -> schema.Pool:
    fields = _fields(load)
    fields["demand"] += occupied
    return schema.Pool(pool=name or None, nodes=nodes, ready=ready, **fields)


def _fields(load: PoolLoad) -> dict[str, Any]:
    return {
        "open_requests": load.open,
        "queue_wait": round(load.queue_wait, 3),
        "demand": load.demand,
        "backlog": load.backlog,
        "attainment": load.attainment,
    }


def _occupied(nodes: NodeTable, pool: str) -> float:
    """Nodes: rows in use, or asked for, on the pool's nodes whose costs were never measured."""
    rows = [row for row in nodes.rows() if nodes.live[row] and nodes.record(row).pool == pool]
    shares = [nodes.requests[row] / nodes.capacity[row] for row in rows if not nodes.modelled[row]]
    return float(np.sum(shares)) if shares else 0.0


routes = [
    ExactRoute("/pools", pools, methods=["GET"]),
    ExactRoute("/pools/autoscaler", lease, methods=["PUT"]),
]
