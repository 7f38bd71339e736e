"""Route GET /metrics/engine: the metrics of the library that computes a node's tokens, as that library gives them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from node_agent.api.adapters import ask, new_id
from node_agent.api.requests import RequestRegistry
from node_agent.ipc import ReadMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus text."""


def metrics_routes(registry: RequestRegistry) -> list[Route]:
    async def engine_metrics(_request: Request) -> Response:
        answer = await ask(registry, ReadMetrics(new_id()))
        return Response(answer.metrics, headers={"content-type": CONTENT_TYPE})

    return [Route("/metrics/engine", engine_metrics, methods=["GET"])]
