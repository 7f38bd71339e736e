"""GET /metrics: Prometheus text, for an admin key."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.params import known_only
from gateway.http.routing import ExactRoute
from gateway.services import services_of


async def metrics(request: Request) -> Response:
    services = services_of(request)
    await services.callers.admin(request)
    known_only(request)
    nodes = await services.cluster.nodes()
    text = services.metrics.render(nodes, await services.windows.attained(), services.cluster.stale)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


routes = [ExactRoute("/metrics", metrics, methods=["GET"])]
