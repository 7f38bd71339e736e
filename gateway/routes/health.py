"""Whether the process lives, and whether it can serve now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from adapters.errors import StoreUnavailable
from cluster.errors import ServiceError
from gateway.http.responses import json_response
from gateway.http.routing import Routes

if TYPE_CHECKING:
    from gateway.services import Services

routes = Routes()


class Check(msgspec.Struct, frozen=True):
    ok: bool
    problem: str | None = None


class ReadyReply(msgspec.Struct, frozen=True):
    status: Literal["ready"]
    checks: dict[str, Check]


class HealthReply(msgspec.Struct, frozen=True):
    status: Literal["alive"]


@routes.public("GET /healthz", "Whether the process lives", {200: HealthReply})
async def healthz(_: Request) -> Response:
    return json_response(HealthReply(status="alive"))


@routes.public("GET /health", "The same, where vLLM's clients ask", {200: HealthReply})
async def health(request: Request) -> ASGIApp:
    """Answers as /healthz does; vLLM's clients ask here."""
    return await healthz(request)


@routes.public(
    "GET /readyz",
    "Whether registry, cluster state and at least one node can serve now",
    {200: ReadyReply},
    errors=(503,),
)
async def readyz(request: Request) -> Response:
    services: Services = request.state.services
    checks = {"store": await _store(services), "cluster": _cluster(services), "nodes": await _nodes(services)}
    problems = [{"check": name, "problem": check.problem} for name, check in checks.items() if not check.ok]
    if problems:
        told = "; ".join(f"{entry['check']}: {entry['problem']}" for entry in problems)
        raise ServiceError("unavailable", f"not ready: {told}", details=problems, retry_after=1.0)
    return json_response(ReadyReply(status="ready", checks=checks))


async def _store(services: Services) -> Check:
    """A store that can only be read is told, but calls are served from it: to take the gateway out would end them."""
    try:
        await services.probe.check_answers()
    except StoreUnavailable:
        return Check(ok=False, problem="the registry does not answer")
    if not await services.probe.is_writable():
        return Check(ok=True, problem="the registry can't be written to (full or read-only): deploys fail")
    return Check(ok=True)


def _cluster(services: Services) -> Check:
    """A stale picture is told, but served from: to take the gateway out would make an outage of it."""
    stale = services.cluster.stale
    if stale is None:
        return Check(ok=True)
    return Check(ok=True, problem=f"Redis has been away for {stale:.0f} s: nodes and limits are as seen here")


async def _nodes(services: Services) -> Check:
    base = services.base
    records = [node.record for node in await services.cluster.nodes()]
    # A node that is starting names its base only once its engine is there.
    states = [record.state for record in records if record.base in (base.fingerprint, "")]
    if "ready" in states:
        return Check(ok=True)
    if await services.dispatcher.hold.applies():
        return Check(ok=True, problem="no node is ready: calls wait for one that the autoscaler starts")
    seen = ", ".join(sorted(states)) if states else "none has reported"
    return Check(ok=False, problem=f"no node is ready to serve {base.id} ({seen})")
