"""Health checks: whether the process is alive, and whether it can serve calls now."""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from adapters.errors import StoreUnavailable
from cluster.errors import ServiceError
from gateway.groups import Nodes
from gateway.http.responses import json_response
from gateway.http.routing import Routes

routes = Routes(Nodes)

VERSION = version("garnish")


class Check(msgspec.Struct, frozen=True):
    ok: bool
    problem: str | None = None


class ReadyReply(msgspec.Struct, frozen=True):
    status: Literal["ready"]
    checks: dict[str, Check]


class HealthReply(msgspec.Struct, frozen=True):
    status: Literal["alive"]


class ServiceVersion(msgspec.Struct, frozen=True):
    version: str


@routes.public("GET /healthz", "Whether the process lives", {200: HealthReply})
async def healthz(_: Request) -> Response:
    return json_response(HealthReply(status="alive"))


@routes.public("GET /health", "The same, where vLLM's clients ask", {200: HealthReply})
async def health(request: Request) -> ASGIApp:
    """Answers like /healthz, at the path that vLLM's clients use."""
    return await healthz(request)


@routes.public("GET /ping", "The same, where SageMaker asks", {200: HealthReply})
async def ping(request: Request) -> ASGIApp:
    """Answers like /healthz, at the path that SageMaker and vLLM's clients use."""
    return await healthz(request)


@routes.public("GET /version", "The version of Garnish", {200: ServiceVersion})
async def get_service_version(_: Request) -> Response:
    return json_response(ServiceVersion(VERSION))


@routes.public(
    "GET /readyz",
    "Whether registry, cluster state and at least one node can serve now",
    {200: ReadyReply},
    errors=(503,),
)
async def readyz(request: Request) -> Response:
    nodes = routes.group(request)
    checks = {
        "store": await _store(nodes),
        "disk": await _disk(nodes),
        "cluster": _cluster(nodes),
        "nodes": await _nodes(nodes),
    }
    problems = [{"check": name, "problem": check.problem} for name, check in checks.items() if not check.ok]
    if problems:
        summary = "; ".join(f"{entry['check']}: {entry['problem']}" for entry in problems)
        raise ServiceError("unavailable", f"not ready: {summary}", details=problems, retry_after=1.0)
    return json_response(ReadyReply(status="ready", checks=checks))


async def _store(nodes: Nodes) -> Check:
    """Returns the check of the registry. A read-only registry is reported as a problem, but counts as ready.

    Calls are still served from it, and taking the gateway out of service would end them.
    """
    try:
        await nodes.probe.check_answers()
    except StoreUnavailable:
        return Check(ok=False, problem="the registry does not answer")
    return Check(ok=True, problem=await nodes.probe.store_problem())


async def _disk(nodes: Nodes) -> Check:
    """Returns the check of this gateway's disk. A full one is reported as a problem, but counts as ready, because calls
    that store nothing continue."""
    return Check(ok=True, problem=await nodes.probe.disk_problem())


def _cluster(nodes: Nodes) -> Check:
    """Returns the check of the cluster state. A stale state is reported as a problem, but counts as ready.

    Calls are still served from it, and taking the gateway out of service would cause an outage.
    """
    stale = nodes.cluster.stale
    if stale is None:
        return Check(ok=True)
    return Check(ok=True, problem=f"Redis has been away for {stale:.0f} s: nodes and limits are as seen here")


async def _nodes(nodes: Nodes) -> Check:
    base = nodes.base
    await nodes.late_nodes.find()
    records = [node.record for node in await nodes.cluster.nodes()]
    # A starting node reports its base only once its engine is running.
    states = [record.state for record in records if record.base in (base.fingerprint, "")]
    if "ready" in states:
        return Check(ok=True)
    if await nodes.hold.should_wait():
        return Check(ok=True, problem="no node is ready: calls wait for one that the autoscaler starts")
    summary = ", ".join(sorted(states)) if states else "none has reported"
    return Check(ok=False, problem=f"no node is ready to serve {base.id} ({summary})")
