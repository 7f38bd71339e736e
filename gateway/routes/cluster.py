"""Routes for nodes' reports to the gateway, authenticated by the cluster secret."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.store import ObjectStore
from cluster.errors import ServiceError
from cluster.http_protocol import mark_keyed
from cluster.messages import BASE_PATH, PROTOCOL_VERSION, VersionMismatch
from cluster.news import FullReportRequest, NodeReport
from cluster.node_book import TooManyNodes
from cluster.record_check import BadRecord, check_news
from cluster.secret import is_authorized
from cluster.state import PublishResult
from gateway.catalog.node_manifests import MANIFEST_LIMIT, take_manifest
from gateway.config import GatewayConfig
from gateway.groups import Nodes
from gateway.http.bodies import read_body
from gateway.http.routing import Routes

routes = Routes(Nodes)
RunInThread = Callable[..., Awaitable[Any]]

MAX_RECORD_BYTES = 4 << 20
RECORD_SECONDS = 5.0
_decode = msgspec.msgpack.Decoder(NodeReport).decode


@routes.public("POST /cluster/record")
async def record(request: Request) -> Response:
    nodes = routes.group(request)
    if not is_authorized(request.headers.get("authorization"), nodes.secret):
        raise ServiceError("unauthenticated", "the cluster secret is missing or wrong")
    mark_keyed(request.scope)
    body = await read_body(request, MAX_RECORD_BYTES, RECORD_SECONDS, RECORD_SECONDS)
    try:
        report = _decode(body)
        node = report.heartbeat.id
        if not nodes.record_rates.allows(node):
            raise ServiceError("rate_limited", f"node {node[:60]} sends too many records", retry_after=1.0)
        outcome = await take_news(nodes, report, request.client.host if request.client else "")
    except msgspec.DecodeError as error:
        raise ServiceError("invalid_request", f"not a node record of version {PROTOCOL_VERSION}: {error}") from error
    except (VersionMismatch, BadRecord) as error:
        raise ServiceError("invalid_request", str(error)) from error
    except TooManyNodes as error:
        raise ServiceError("overloaded", str(error)) from error
    if outcome == "gap":
        return Response(msgspec.msgpack.encode(FullReportRequest()), media_type="application/msgpack")
    return Response(status_code=204)


@routes.public(f"POST {BASE_PATH}")
async def base(request: Request) -> Response:
    nodes = routes.group(request)
    return await receive_manifest(request, nodes.secret, nodes.registry.store, nodes.config, nodes.threads.write)


async def receive_manifest(
    request: Request, secret: str, store: ObjectStore, config: GatewayConfig, run: RunInThread
) -> Response:
    """Takes the manifest of the base model from a node, and returns the reply once it is stored. `run` runs a blocking
    function in a thread. Raises ServiceError, StoreUnavailable."""
    if not is_authorized(request.headers.get("authorization"), secret):
        raise ServiceError("unauthenticated", "the cluster secret is missing or wrong")
    mark_keyed(request.scope)
    body = await read_body(request, MANIFEST_LIMIT, RECORD_SECONDS, RECORD_SECONDS)
    await run(take_manifest, store, config, body)
    return Response(status_code=204)


async def take_news(nodes: Nodes, report: NodeReport, peer: str) -> PublishResult:
    """Checks and publishes a node's report, and returns the outcome. `peer`: the sender's address.

    Raises BadRecord, VersionMismatch, TooManyNodes.
    """
    check_news(report, peer, nodes.config.node_hosts)
    return await nodes.cluster.publish(report)
