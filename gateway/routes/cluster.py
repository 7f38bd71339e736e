"""Routes for nodes' reports to the gateway, authenticated by the cluster secret."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.http_protocol import mark_keyed
from cluster.messages import PROTOCOL_VERSION, VersionMismatch
from cluster.news import FullReportRequest, NodeReport
from cluster.node_book import TooManyNodes
from cluster.record_check import BadRecord, check_news
from cluster.secret import is_authorized
from cluster.state import PublishResult
from gateway.groups import Nodes
from gateway.http.bodies import read_body
from gateway.http.routing import Routes

routes = Routes(Nodes)

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


async def take_news(nodes: Nodes, report: NodeReport, peer: str) -> PublishResult:
    """Checks and publishes a node's report, and returns the outcome. `peer`: the sender's address.

    Raises BadRecord, VersionMismatch, TooManyNodes.
    """
    check_news(report, peer, nodes.config.node_hosts)
    return await nodes.cluster.publish(report)
