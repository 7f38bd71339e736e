"""GET /metrics: Prometheus text, for an admin key."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.routing import Routes
from gateway.services import Services

routes = Routes()


@routes.admin("GET /metrics", "Prometheus text", {200: str})
async def metrics(_: Request, services: Services) -> Response:
    nodes = await services.cluster.nodes()
    text = services.metrics.render(nodes, await services.windows.attained(), services.cluster.stale)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
