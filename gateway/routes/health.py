"""Whether the process lives, and whether it can serve now."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import StoreUnavailable
from cluster.errors import ServiceError
from gateway.api import schema
from gateway.http.params import known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.services import Services, services_of


async def healthz(request: Request) -> Response:
    known_only(request)
    return json_response(schema.HealthReply(status="alive"))


async def health(request: Request) -> Response:
    """As /healthz, where vLLM's clients ask."""
    return await healthz(request)


async def readyz(request: Request) -> Response:
    known_only(request)
    services = services_of(request)
    checks = {"store": await _store(services), "cluster": _cluster(services), "nodes": await _nodes(services)}
    problems = [{"check": name, "problem": check.problem} for name, check in checks.items() if not check.ok]
    if problems:
        told = "; ".join(f"{entry['check']}: {entry['problem']}" for entry in problems)
        raise ServiceError("unavailable", f"not ready: {told}", details=problems, retry_after=1.0)
    return json_response(schema.ReadyReply(status="ready", checks=checks))


async def _store(services: Services) -> schema.Check:
    """A store that can only be read is told, but calls are served from it: to take the gateway out would end them."""
    try:
        await services.probe.check_answers()
    except StoreUnavailable:
        return schema.Check(ok=False, problem="the registry does not answer")
    if not await services.probe.is_writable():
        return schema.Check(ok=True, problem="the registry can't be written to (full or read-only): deploys fail")
    return schema.Check(ok=True)


def _cluster(services: Services) -> schema.Check:
    """A stale picture is told, but served from: to take the gateway out would make an outage of it."""
    stale = services.cluster.stale
    if stale is None:
        return schema.Check(ok=True)
    return schema.Check(ok=True, problem=f"Redis has been away for {stale:.0f} s: nodes and limits are as seen here")


async def _nodes(services: Services) -> schema.Check:
    base = services.base
    records = [node.record for node in await services.cluster.nodes()]
    # A node that is starting names its base only once its engine is there.
    states = [record.state for record in records if record.base in (base.fingerprint, "")]
    if "ready" in states:
        return schema.Check(ok=True)
    if await services.hold.applies():
        return schema.Check(ok=True, problem="no node is ready: calls wait for one that the autoscaler starts")
    seen = ", ".join(sorted(states)) if states else "none has reported"
    return schema.Check(ok=False, problem=f"no node is ready to serve {base.id} ({seen})")


routes = [
    ExactRoute("/healthz", healthz, methods=["GET"]),
    ExactRoute("/health", health, methods=["GET"]),
    ExactRoute("/readyz", readyz, methods=["GET"]),
]
