"""POST /deploy/{name}: creates a version of a function from an adapter's files, which are uploaded or copied from a
source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from adapters import strict_json
from adapters.deployment import AdapterUpload, Deployment
from adapters.function_changes import check_options
from adapters.functions import ITEM_BYTES, OwnDefaults
from adapters.names import is_name
from adapters.rank_limit import RankLimit
from adapters.sources import Place
from cluster.errors import ServiceError
from gateway.calls.adapter_text import own_defaults
from gateway.calls.parameters import check_defaults
from gateway.catalog.adapters import adapter_of
from gateway.catalog.rank_limit import rank_limit
from gateway.catalog.source_copy import allowed_place, copied_source
from gateway.groups import Catalog
from gateway.http.bodies import media_type, read_message
from gateway.http.errors import invalid
from gateway.http.multipart import Upload, receive_upload
from gateway.http.params import flag
from gateway.http.responses import json_response
from gateway.http.routing import BOOLEAN, NAME_PATTERN, Routes, parameter
from gateway.residency.messages import Version
from gateway.residency.warm_on_deploy import WARM, warm_staged

if TYPE_CHECKING:
    from adapters.deployment import Deployment

routes = Routes(Catalog)

ADAPTER_FORM = {
    "type": "object",
    "required": ["adapter_config.json", "adapter_model.safetensors"],
    "additionalProperties": False,
    "properties": {
        "adapter_config.json": {"type": "string", "contentMediaType": "application/json"},
        "adapter_model.safetensors": {"type": "string", "contentMediaType": "application/octet-stream"},
        "chat_template.jinja": {"type": "string", "contentMediaType": "text/plain"},
        "tokenizer_config.json": {"type": "string", "contentMediaType": "application/json"},
        "policy": {"type": "string", "contentMediaType": "application/json"},
        "alias": {"type": "string", "pattern": NAME_PATTERN},
    },
}


class DeploySource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to deploy an adapter's files from a location that the operator allows."""

    source: Annotated[str, Meta(min_length=1, max_length=2048)]
    policy: dict[str, Any] | None = None
    alias: str | None = None


class DeployReply(msgspec.Struct, frozen=True):
    """Result of a deploy. `version` is null after a dry run, which stores nothing. `ranks` and `targets` are the
    adapter's ranks and target modules. `bytes` is its size."""

    function: str
    version: int | None
    digest: str
    ranks: tuple[int, ...]
    targets: tuple[str, ...]
    bytes: int
    warnings: tuple[str, ...]


class How(NamedTuple):
    """Options of a deploy."""

    dry_run: bool
    warm: bool


CREATE = How(dry_run=False, warm=False)


# `:path`, so that a name with slashes is reported as a malformed name, not as an unknown route.
@routes.tenant(
    "POST /deploy/{name:path}",
    "Make an adapter's files, sent or in an allowed place, a version of a function; point an alias to it",
    {201: DeployReply, 200: DeployReply},
    parameters=(parameter("query", "dry_run", "Only validate; nothing is stored", BOOLEAN), WARM),
    body=DeploySource,
    multipart=ADAPTER_FORM,
    errors=(409, 499, 504),
    limits=("adapters", "bytes"),
)
async def deploy(request: Request, catalog: Catalog, tenant: str) -> Response:
    name = request.path_params["name"]
    check_name(name, "name")
    how = How(flag(request, "dry_run"), flag(request, "warm"))
    body_type = media_type(request)
    if body_type == "application/json":
        return await _from_source(catalog, request, tenant, name, how)
    if body_type != "multipart/form-data":
        message = "send multipart/form-data with the adapter's two files, or application/json with a source"
        raise ServiceError("unsupported_media_type", message)
    with catalog.pools["deploys"].hold_now(tenant):
        return await _from_upload(catalog, request, tenant, name, how)


def check_name(name: str, field: str) -> None:
    """Raises ServiceError, about the request's field, if the name can't be a function's."""
    if not is_name(name):
        rule = "has 1 to 64 of a-z, 0-9, '.', '_' and '-', and starts and ends with a letter or digit"
        raise invalid(field, f"a function's name {rule}")


async def _from_upload(catalog: Catalog, request: Request, tenant: str, name: str, how: How) -> Response:
    async with receive_upload(request, catalog.config) as upload:
        limit, defaults = (
            await _rank_limit(catalog),
            await _version_defaults(catalog, request, tenant, upload.text_files),
        )
        adapter = AdapterUpload(
            upload.config, upload.weights, _alias(upload), _policy(upload), rank_limit=limit, version_defaults=defaults
        )
        return await _store(catalog, request, tenant, name, adapter, how)


async def _from_source(catalog: Catalog, request: Request, tenant: str, name: str, how: How) -> Response:
    body = await read_message(request, catalog.config, DeploySource)
    place = allowed_place(catalog.sources, body.source)
    check_options(body.alias, body.policy)
    return await deploy_from(catalog, request, tenant, name, place, body, how)


async def deploy_from(
    catalog: Catalog, request: Request, tenant: str, name: str, place: Place, body: DeploySource, how: How = CREATE
) -> Response:
    """Deploys the files of an allowed place. Raises ServiceError, InvalidRequest about `source`, and the registry's
    errors."""
    with catalog.pools["deploys"].hold_now(tenant):
        async with copied_source(catalog.config, catalog.sources, catalog.source_threads, place) as files:
            limit, defaults = (
                await _rank_limit(catalog),
                await _version_defaults(catalog, request, tenant, files.text_files),
            )
            adapter = AdapterUpload(files.config, files.weights, body.alias, body.policy, body.source, limit, defaults)
            return await _store(catalog, request, tenant, name, adapter, how)


async def _rank_limit(catalog: Catalog) -> RankLimit | None:
    return await rank_limit(catalog.cluster, catalog.base.fingerprint, catalog.config.max_lora_rank)


async def _version_defaults(catalog: Catalog, request: Request, tenant: str, files: dict[str, bytes]) -> OwnDefaults:
    return await own_defaults(files, catalog.text, catalog.templates, tenant=tenant, receive=request.receive)


async def _store(
    catalog: Catalog, request: Request, tenant: str, name: str, upload: AdapterUpload, how: How
) -> Response:
    problems: list[str] = []
    registry, staged = catalog.registry, None
    aliases = ("latest",) if upload.alias is None else (upload.alias, "latest")
    await catalog.destinations.check_policy(tenant, name, upload.policy or {}, within="policy.", aliases=aliases)
    wait, threads = catalog.config.deploy_wait, catalog.deploy_threads
    await catalog.templates.check(
        tenant, upload.policy or {}, special=catalog.text.special, receive=request.receive, within="policy."
    )
    check_defaults(upload.policy or {}, catalog.text, catalog.base.vocab_size, within="policy.")
    if how.dry_run:
        checked = await threads.run(partial(registry.check, upload, name), wait)
        return json_response(await _reply(catalog, checked, problems))
    if how.warm:
        staged = await threads.run(partial(registry.stage, tenant, name, upload), wait)
        # No place is held during the wait.
        version = Version(staged.version.version, adapter_of(staged.version))
        problems += await warm_staged(catalog.warming, tenant, name, version)
    memory = await catalog.residency.provisionable()
    with catalog.functions.changing(tenant, name):
        deployment = await threads.run(partial(registry.deploy, tenant, name, upload, staged, memory), wait)
    return json_response(await _reply(catalog, deployment, problems), 201 if deployment.created else 200)


def _policy(upload: Upload) -> dict[str, Any] | None:
    if upload.policy is None:
        return None
    try:
        policy = strict_json.loads(upload.policy)
    except strict_json.InvalidJson as error:
        raise ServiceError("invalid_request", f"the part policy is not valid JSON: {error}", param="policy") from None
    if not isinstance(policy, dict):
        raise invalid("policy", "policy must be a JSON object")
    return policy


def _alias(upload: Upload) -> str | None:
    if upload.alias is None:
        return None
    try:
        return upload.alias.decode("ascii")
    except UnicodeDecodeError:
        raise invalid("alias", "an alias is made of a-z, 0-9, '.', '_', '-'") from None


async def _reply(catalog: Catalog, deployment: Deployment, problems: Sequence[str]) -> DeployReply:
    fields = {field: getattr(deployment, field) for field in DeployReply.__struct_fields__}
    fields["warnings"] = (*deployment.warnings, *await _room_warnings(catalog, deployment), *problems)
    return msgspec.convert(fields, DeployReply)


async def _room_warnings(catalog: Catalog, deployment: Deployment) -> list[str]:
    """Returns a warning if all known nodes would refuse calls of the adapter with status 413; otherwise an empty list.

    Nodes store adapters in their own dtype with some padding. So an adapter that barely fits may be refused without a
    warning, but there is no warning about an adapter that will be served.
    """
    elements = deployment.bytes // ITEM_BYTES[deployment.dtype]
    fits: list[tuple[int, int]] = []
    for node in await catalog.cluster.nodes():
        record = node.record
        room = record.largest_adapter  # 0: a starting node reports no memory yet
        if record.base == catalog.base.fingerprint and room:
            fits.append((room, elements * (record.adapter_itemsize or min(ITEM_BYTES.values()))))
    if not fits or any(needed <= room for room, needed in fits):
        return []
    room, needed = max(fits)
    return [
        f"the adapter takes {needed} bytes on a node, and the roomiest one has {room} bytes for an adapter: calls will "
        "be answered 413 until `adapter_memory` (and `host_memory`) are raised"
    ]
