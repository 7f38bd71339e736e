"""What nodes tell the gateway (cluster secret)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.messages import PROTOCOL_VERSION, VersionMismatch
from cluster.news import FullReportRequest, NodeReport
from cluster.node_book import TooManyNodes
from cluster.record_check import BadRecord, check_news
from cluster.secret import is_authorized
from cluster.state import PublishResult
from gateway.http.bodies import read_body
from gateway.http.routing import Routes

if TYPE_CHECKING:
    from gateway.services import Services

routes = Routes()

RECORD_LIMIT = 4 << 20
"""Bytes of a record: some 20,000 resident adapters."""
RECORD_SECONDS = 5.0
_decode = msgspec.msgpack.Decoder(NodeReport).decode


@routes.public("POST /cluster/record")
async def record(request: Request) -> Response:
    services: Services = request.state.services
    if not is_authorized(request.headers.get("authorization"), services.secret):
        raise ServiceError("unauthenticated", "the cluster secret is missing or wrong")
    body = await read_body(request, RECORD_LIMIT, RECORD_SECONDS, RECORD_SECONDS)
    try:
        news = _decode(body)
        node = news.heartbeat.id
        if not services.record_rates.allows(node):
            raise ServiceError("rate_limited", f"node {node[:60]} sends too many records", retry_after=1.0)
        taken = await take_news(services, news, request.client.host if request.client else "")
    except msgspec.DecodeError as error:
        raise ServiceError("invalid_request", f"not a node record of version {PROTOCOL_VERSION}: {error}") from error
    except (VersionMismatch, BadRecord) as error:
        raise ServiceError("invalid_request", str(error)) from error
    except TooManyNodes as error:
        raise ServiceError("overloaded", str(error)) from error
    if taken == "gap":
        return Response(msgspec.msgpack.encode(FullReportRequest()), media_type="application/msgpack")
    return Response(status_code=204)


async def take_news(services: Services, news: NodeReport, peer: str) -> PublishResult:
    """`peer`: where they came from. Raises BadRecord, VersionMismatch, TooManyNodes."""
    check_news(news, peer, services.config.node_hosts)
    return await services.cluster.publish(news)
