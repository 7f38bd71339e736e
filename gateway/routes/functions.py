"""Routes /functions: list functions; show, change and delete one; list, show and delete its versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import NotFound
from adapters.functions import BrokenFunction, FunctionRecord, Manifest, Policy, VersionEntry
from adapters.names import is_name
from gateway.calls.parameters import check_defaults
from gateway.groups import Catalog
from gateway.http.bodies import read_message
from gateway.http.errors import invalid
from gateway.http.params import etag, flag, if_match, integer
from gateway.http.rates import READ_MANY
from gateway.http.responses import json_response
from gateway.http.routing import BOOLEAN, NAME_TEXT, Routes, parameter
from gateway.routes.aliases import only_version

if TYPE_CHECKING:
    from cluster.node_book import NodeView

routes = Routes(Catalog)

MAX_PAGE = 1000


class Residency(msgspec.Struct, frozen=True):
    """Memory tier of a node that holds a version. Only versions are listed that the tenant has provisioned, or has
    called since the gateway started."""

    version: int
    node: str
    tier: str


class FunctionItem(msgspec.Struct, frozen=True):
    name: str
    versions: list[int]
    aliases: dict[str, int | dict[str, float]]
    ranks: list[int]
    """Ranks of the version to which `latest` points. `bytes` is the size of the same version. If `latest` splits its
    calls, the version with the largest share is used."""
    bytes: int
    residency: list[Residency]
    error: str | None = None


class FunctionList(msgspec.Struct, frozen=True):
    functions: list[FunctionItem]
    next: str | None


class VersionItem(msgspec.Struct, frozen=True):
    version: int
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    created: float


class VersionReply(msgspec.Struct, frozen=True):
    """Description of a version, from the manifest of its adapter."""

    function: str
    version: int
    digest: str
    base_id: str
    dtype: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...]
    config_sha256: str
    weights_sha256: str
    created: float
    source: str | None = None


class VersionList(msgspec.Struct, frozen=True):
    versions: list[VersionReply]


class LastHour(msgspec.Struct, frozen=True):
    """Counts of the function's calls in the last 60 minutes, on this gateway."""

    invocations: int
    failures: int
    prompt_tokens: int
    completion_tokens: int
    mean_ttft_ms: float | None


class FunctionReply(msgspec.Struct, frozen=True):
    name: str
    created: float
    generation: int
    policy: dict[str, Any]
    aliases: dict[str, int | dict[str, float]]
    versions: list[VersionItem]
    residency: list[Residency]
    last_hour: LastHour


_LIMIT = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 100}


@routes.tenant(
    "GET /functions",
    "The tenant's functions, a page at a time",
    {200: FunctionList},
    parameters=(
        parameter("query", "limit", "Functions per page", _LIMIT),
        parameter("query", "after", "`next` of the page before", NAME_TEXT),
    ),
    rate=READ_MANY,
)
async def list_functions(request: Request, catalog: Catalog, tenant: str) -> Response:
    limit = integer(request, "limit", 100, 1, MAX_PAGE)
    after = request.query_params.get("after", "")
    if after and not is_name(after):
        raise invalid("after", "after must be the `next` of the previous page")
    records, following = await catalog.threads.read(catalog.registry.functions, tenant, after, limit)
    nodes = await catalog.cluster.nodes()
    items = [
        FunctionItem(record.name, [], {}, [], 0, [], error=record.problem)
        if isinstance(record, BrokenFunction)
        else _item(record, _called(catalog, tenant, record), nodes)
        for record in records
    ]
    return json_response(FunctionList(functions=items, next=following))


@routes.tenant(
    "GET /functions/{name}",
    "One function: policy, aliases, versions, where they are resident, its last hour",
    {200: FunctionReply},
    etag=True,
)
async def get_function(request: Request, catalog: Catalog, tenant: str) -> Response:
    record = await catalog.threads.read(catalog.registry.function, tenant, request.path_params["name"])
    return await _function_reply(catalog, tenant, record)


@routes.tenant(
    "PATCH /functions/{name}",
    "Change the stated fields of a function's policy; null takes one back",
    {200: FunctionReply},
    body=Policy,
    errors=(409, 499, 504),
    etag=True,
    if_match=True,
)
async def change_policy(request: Request, catalog: Catalog, tenant: str) -> Response:
    name = request.path_params["name"]
    policy = await read_message(request, catalog.config, dict[str, Any])
    await catalog.destinations.check_policy(tenant, name, policy)
    await catalog.templates.check(tenant, policy, special=catalog.text.special, receive=request.receive)
    check_defaults(policy, catalog.text, catalog.base.vocab_size)
    set_policy, memory = catalog.registry.changes.set_policy, await catalog.residency.provisionable()
    record = await catalog.functions.change(set_policy, tenant, name, policy, if_match(request), memory)
    return await _function_reply(catalog, tenant, record)


async def _function_reply(catalog: Catalog, tenant: str, record: FunctionRecord) -> Response:
    sums = await catalog.windows.last_hour(tenant, record.name)
    mean = round(sums.ttft_seconds / sums.first_tokens * 1000, 3) if sums.first_tokens else None
    reply = FunctionReply(
        name=record.name,
        created=record.created,
        generation=record.generation,
        policy=msgspec.to_builtins(record.policy),
        aliases=_aliases(record),
        versions=[msgspec.convert(entry, VersionItem, from_attributes=True) for entry in record.versions],
        residency=_residency(_called(catalog, tenant, record), await catalog.cluster.nodes()),
        last_hour=msgspec.convert({**msgspec.structs.asdict(sums), "mean_ttft_ms": mean}, LastHour),
    )
    return json_response(reply, headers={"etag": etag(record.generation)})


@routes.tenant(
    "DELETE /functions/{name}",
    "Delete a function: new calls answer 404 at once, running ones finish",
    {204: None},
    parameters=(parameter("query", "force", "Cancel the running ones, too", BOOLEAN),),
    if_match=True,
)
async def delete_function(request: Request, catalog: Catalog, tenant: str) -> Response:
    force = flag(request, "force")
    name = request.path_params["name"]
    await catalog.functions.change(catalog.registry.delete_function, tenant, name, if_match(request))
    if force:
        await catalog.changes.revoke(tenant, name, f"function {name} was deleted")
    return Response(status_code=204)


@routes.tenant("GET /functions/{name}/versions", "The manifests of all versions", {200: VersionList}, rate=READ_MANY)
async def list_versions(request: Request, catalog: Catalog, tenant: str) -> Response:
    manifests = await catalog.threads.read(catalog.registry.versions, tenant, request.path_params["name"])
    return json_response(VersionList(versions=[_manifest(manifest) for manifest in manifests]))


@routes.tenant("GET /functions/{name}/versions/{version}", "The manifest of one version", {200: VersionReply})
async def get_version(request: Request, catalog: Catalog, tenant: str) -> Response:
    name, number = request.path_params["name"], _number(request)
    return json_response(_manifest(await catalog.threads.read(catalog.registry.manifest, tenant, name, number)))


@routes.tenant(
    "DELETE /functions/{name}/versions/{version}",
    "Delete a version that no alias points to",
    {204: None},
    errors=(409,),
    if_match=True,
)
async def delete_version(request: Request, catalog: Catalog, tenant: str) -> Response:
    name, number = request.path_params["name"], _number(request)
    await catalog.functions.change(catalog.registry.delete_version, tenant, name, number, if_match(request))
    return Response(status_code=204)


def _number(request: Request) -> int:
    version: str = request.path_params["version"]
    if not (version.isascii() and version.isdigit() and len(version) < 10):
        raise NotFound(f"there is no version {version[:100]!r}")
    return int(version)


def _item(record: FunctionRecord, called: Sequence[VersionEntry], nodes: Sequence[NodeView]) -> FunctionItem:
    weights = record.aliases["latest"].weights if "latest" in record.aliases else {}
    largest = max(weights, key=weights.__getitem__, default="")
    latest = next((entry for entry in record.versions if str(entry.version) == largest), None)
    return FunctionItem(
        name=record.name,
        versions=[entry.version for entry in record.versions],
        aliases=_aliases(record),
        ranks=list(latest.ranks) if latest else [],
        bytes=latest.bytes if latest else 0,
        residency=_residency(called, nodes),
    )


def _aliases(record: FunctionRecord) -> dict[str, int | dict[str, float]]:
    """Returns the version of each alias, or its weights if it has several versions."""
    return {name: only_version(alias.weights) or alias.weights for name, alias in record.aliases.items()}


def _called(catalog: Catalog, tenant: str, record: FunctionRecord) -> list[VersionEntry]:
    """Returns the versions whose residency the tenant may see: those that the tenant has run or provisioned.

    The residency of other adapters would reveal another tenant's use of them.
    """
    return [entry for entry in record.versions if catalog.called.has(tenant, entry.digest)]


def _residency(called: Sequence[VersionEntry], nodes: Sequence[NodeView]) -> list[Residency]:
    return [
        Residency(version=entry.version, node=node.record.id, tier=node.residents[entry.digest].tier)
        for node in nodes
        for entry in called
        if entry.digest in node.residents
    ]


def _manifest(manifest: Manifest) -> VersionReply:
    return msgspec.convert(manifest, VersionReply, from_attributes=True)
