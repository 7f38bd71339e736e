"""GET /functions; GET, PATCH, DELETE /functions/{name}; GET /functions/{name}/versions, and DELETE of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.aliases import Alias
from adapters.errors import NotFound
from adapters.functions import BrokenFunction, FunctionRecord, Manifest, VersionEntry
from adapters.names import is_name
from cluster.errors import ServiceError
from cluster.state import NodeView
from gateway.api import schema
from gateway.http.bodies import decode_json, read_call_body
from gateway.http.params import etag, flag, if_match, integer, known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.services import Services, services_of

MAX_PAGE = 1000


async def list_functions(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request, "limit", "after")
    limit = integer(request, "limit", 100, 1, MAX_PAGE)
    after = request.query_params.get("after", "")
    if after and not is_name(after):
        raise ServiceError("validation_failed", "after is the `next` of the page before", param="after")
    records, following = await services.threads.read(services.registry.functions, tenant, after, limit)
    nodes = await services.cluster.nodes()
    items = [
        schema.FunctionItem(record.name, [], {}, [], 0, [], error=record.problem)
        if isinstance(record, BrokenFunction)
        else _item(record, _called(services, tenant, record), nodes)
        for record in records
    ]
    return json_response(schema.FunctionList(functions=items, next=following))


async def function(request: Request) -> Response:
    """One route for all methods, so that a 405 names them all."""
    chosen = {"DELETE": delete_function, "PATCH": patch_function}.get(request.method, get_function)
    return await chosen(request)


async def get_function(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    record = await services.threads.read(services.registry.function, tenant, request.path_params["name"])
    return await _function_reply(services, tenant, record)


async def patch_function(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    name = request.path_params["name"]
    policy = decode_json(await read_call_body(request, services.config), dict[str, Any])
    with services.functions.changing(tenant, name):
        record = await services.threads.write(
            services.registry.changes.set_policy, tenant, name, policy, if_match(request)
        )
    return await _function_reply(services, tenant, record)


async def _function_reply(services: Services, tenant: str, record: FunctionRecord) -> Response:
    sums = await services.windows.last_hour(tenant, record.name)
    reply = schema.FunctionReply(
        name=record.name,
        created=record.created,
        generation=record.generation,
        policy=msgspec.to_builtins(record.policy),
        aliases=_aliases(record),
        versions=[msgspec.convert(entry, schema.VersionItem, from_attributes=True) for entry in record.versions],
        residency=_residency(_called(services, tenant, record), await services.cluster.nodes()),
        last_hour=schema.LastHour(
            invocations=sums.invocations,
            failures=sums.failures,
            prompt_tokens=sums.prompt_tokens,
            completion_tokens=sums.completion_tokens,
            mean_ttft_ms=round(sums.ttft_seconds / sums.first_tokens * 1000, 3) if sums.first_tokens else None,
        ),
    )
    return json_response(reply, headers={"etag": etag(record.generation)})


async def delete_function(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request, "force")
    force = flag(request, "force")
    name = request.path_params["name"]
    with services.functions.changing(tenant, name):
        await services.threads.write(services.registry.delete_function, tenant, name, if_match(request))
    if force:
        await services.revoke(tenant, name, f"function {name} was deleted")
    return Response(status_code=204)


async def list_versions(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    manifests = await services.threads.read(services.registry.versions, tenant, request.path_params["name"])
    return json_response(schema.VersionList(versions=[_manifest(manifest) for manifest in manifests]))


async def version(request: Request) -> Response:
    """One route for both methods, so that a 405 names both."""
    return await (delete_version if request.method == "DELETE" else get_version)(request)


async def get_version(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    name, number = request.path_params["name"], _number(request)
    return json_response(_manifest(await services.threads.read(services.registry.manifest, tenant, name, number)))


async def delete_version(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    name, number = request.path_params["name"], _number(request)
    with services.functions.changing(tenant, name):
        await services.threads.write(services.registry.delete_version, tenant, name, number, if_match(request))
    return Response(status_code=204)


def _number(request: Request) -> int:
    version: str = request.path_params["version"]
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise NotFound(f"there is no version {version[:100]!r}")
    return int(version)


def _item(record: FunctionRecord, called: Sequence[VersionEntry], nodes: Sequence[NodeView]) -> schema.FunctionItem:
    weights = record.aliases["latest"].weights if "latest" in record.aliases else {}
    most = max(weights, key=weights.__getitem__, default="")
    latest = next((entry for entry in record.versions if str(entry.version) == most), None)
    return schema.FunctionItem(
        name=record.name,
        versions=[entry.version for entry in record.versions],
        aliases=_aliases(record),
        ranks=list(latest.ranks) if latest else [],
        bytes=latest.bytes if latest else 0,
        residency=_residency(called, nodes),
    )


def _aliases(record: FunctionRecord) -> dict[str, int | dict[str, float]]:
    return {name: _pointed(alias) for name, alias in record.aliases.items()}


def _pointed(alias: Alias) -> int | dict[str, float]:
    """The version, or the weights when there are several."""
    return int(next(iter(alias.weights))) if len(alias.weights) == 1 else alias.weights


def _called(services: Services, tenant: str, record: FunctionRecord) -> list[VersionEntry]:
    """The versions whose residency the tenant may see: an adapter that it never ran is there for someone else."""
    return [entry for entry in record.versions if services.called.has(tenant, entry.digest)]


def _residency(called: Sequence[VersionEntry], nodes: Sequence[NodeView]) -> list[schema.Residency]:
    return [
        schema.Residency(version=entry.version, node=node.record.id, tier=node.residents[entry.digest].tier)
        for node in nodes
        for entry in called
        if entry.digest in node.residents
    ]


def _manifest(manifest: Manifest) -> schema.VersionReply:
    return msgspec.convert(manifest, schema.VersionReply, from_attributes=True)


routes = [
    ExactRoute("/functions", list_functions, methods=["GET"]),
    ExactRoute("/functions/{name}", function, methods=["GET", "PATCH", "DELETE"]),
    ExactRoute("/functions/{name}/versions", list_versions, methods=["GET"]),
    ExactRoute("/functions/{name}/versions/{version}", version, methods=["GET", "DELETE"]),
]
