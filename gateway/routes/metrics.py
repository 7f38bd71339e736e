"""GET /metrics: Prometheus text, for an admin key."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.groups import Nodes
from gateway.http.routing import Routes

routes = Routes(Nodes)


@routes.admin("GET /metrics", "Prometheus text", {200: str})
async def metrics(_: Request, nodes: Nodes) -> Response:
    views = await nodes.cluster.nodes()
    text = nodes.metrics.render(views, await nodes.windows.attained(), nodes.cluster.stale)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
