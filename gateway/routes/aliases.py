"""GET and PUT /functions/{name}/aliases/{alias}, POST /functions/{name}/rollback: which version a name means."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import NotFound
from adapters.functions import FunctionRecord
from adapters.names import NAME_RULE, is_alias
from adapters.nearest import did_you_mean
from cluster.errors import ServiceError
from gateway.api.alias_schema import AliasPast, AliasReply, AliasTarget, Rollback
from gateway.http.bodies import decode_json, read_call_body
from gateway.http.params import etag, if_match, known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.services import services_of


async def alias(request: Request) -> Response:
    """One route for both methods, so that a 405 names both."""
    return await (put_alias if request.method == "PUT" else get_alias)(request)


async def get_alias(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    record = await services.threads.read(services.registry.function, tenant, request.path_params["name"])
    return _reply(record, request.path_params["alias"])


async def put_alias(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    name, moved = request.path_params["name"], request.path_params["alias"]
    wanted = decode_json(await read_call_body(request, services.config), AliasTarget)
    if (wanted.version is None) == (wanted.weights is None):
        raise ServiceError("validation_failed", "send exactly one of version and weights", param="version")
    if not is_alias(moved):
        raise NotFound(f"there is no alias {moved[:100]!r}: an alias has {NAME_RULE}, not all of them digits")
    weights = {str(wanted.version): 1.0} if wanted.weights is None else wanted.weights
    with services.functions.changing(tenant, name):
        record = await services.threads.write(
            services.registry.changes.set_alias, tenant, name, moved, weights, if_match(request)
        )
    return _reply(record, moved)


async def roll_back(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    name = request.path_params["name"]
    wanted = decode_json(await read_call_body(request, services.config) or b"{}", Rollback)
    with services.functions.changing(tenant, name):
        record = await services.threads.write(
            services.registry.changes.roll_back, tenant, name, wanted.alias, if_match(request)
        )
    return _reply(record, wanted.alias)


def _reply(record: FunctionRecord, name: str) -> Response:
    found = record.aliases.get(name)
    if found is None:
        hint = did_you_mean(name, record.aliases)
        raise NotFound(f"function {record.name} has no alias {name[:100]!r}{hint}")
    reply = AliasReply(
        function=record.name,
        alias=name,
        version=_only(found.weights),
        weights=found.weights,
        since=found.when,
        changes=found.generation,
        generation=record.generation,
        history=[AliasPast(_only(past.weights), past.weights, past.when) for past in reversed(found.history)],
    )
    return json_response(reply, headers={"etag": etag(record.generation)})


def _only(weights: dict[str, float]) -> int | None:
    return int(next(iter(weights))) if len(weights) == 1 else None


routes = [
    ExactRoute("/functions/{name}/aliases/{alias}", alias, methods=["GET", "PUT"]),
    ExactRoute("/functions/{name}/rollback", roll_back, methods=["POST"]),
]
