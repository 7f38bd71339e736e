"""Routes for nodes, which report to the gateway (cluster secret)."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.messages import VersionMismatch, check_version
from cluster.news import News, Wanted
from cluster.node_book import TooManyNodes
from cluster.old_record import OldRecord, decode_news, news_of_old
from cluster.record_check import BadRecord, check_news
from cluster.secret import is_authorized
from cluster.state import PublishResult
from gateway.groups import Nodes
from gateway.http.bodies import read_body
from gateway.http.routing import Routes

routes = Routes(Nodes)

RECORD_LIMIT = 4 << 20
"""Bytes of a record: some 20,000 resident adapters."""
RECORD_SECONDS = 5.0


@routes.public("POST /cluster/record")
async def record(request: Request) -> Response:
    nodes = routes.group(request)
    if not is_authorized(request.headers.get("authorization"), nodes.secret):
        raise ServiceError("unauthenticated", "the cluster secret is missing or wrong")
    body = await read_body(request, RECORD_LIMIT, RECORD_SECONDS, RECORD_SECONDS)
    try:
        news = decode_news(body)
        node = news.id if isinstance(news, OldRecord) else news.heartbeat.id
        if not nodes.record_rates.allows(node):
            raise ServiceError("rate_limited", f"node {node[:60]} sends too many records", retry_after=1.0)
        outcome = await take_news(nodes, news, request.client.host if request.client else "")
    except msgspec.DecodeError as error:
        raise ServiceError("invalid_request", f"not a node record: {error}") from error
    except (VersionMismatch, BadRecord) as error:
        raise ServiceError("invalid_request", str(error)) from error
    except TooManyNodes as error:
        raise ServiceError("overloaded", str(error)) from error
    if outcome == "gap":
        return Response(msgspec.msgpack.encode(Wanted()), media_type="application/msgpack")
    return Response(status_code=204)


async def take_news(nodes: Nodes, report: News | OldRecord, peer: str) -> PublishResult:
    """`peer`: where they came from. Raises BadRecord, VersionMismatch, TooManyNodes."""
    cluster, hosts = nodes.cluster, nodes.config.node_hosts
    if isinstance(report, News):
        check_news(report, peer, hosts)
        return await cluster.publish(report)
    check_version(report.v)
    news = news_of_old(report, cluster.residents(report.id, report.epoch))
    check_news(news, peer, hosts)
    if await cluster.publish(news) == "gap":
        return await cluster.publish(news_of_old(report, None))
    return "taken"
