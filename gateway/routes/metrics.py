"""GET /metrics: Prometheus text, for an admin key."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.services import services_of


async def metrics(request: Request) -> Response:
    services = services_of(request)
    await services.callers.admin(request)
    states = Counter(node.record.state for node in await services.cluster.nodes())
    return Response(services.metrics.render(states), headers={"content-type": CONTENT_TYPE_LATEST})


routes = [Route("/metrics", metrics, methods=["GET"])]
