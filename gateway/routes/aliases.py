"""GET and PUT /functions/{name}/aliases/{alias}, POST /functions/{name}/rollback: the version that a name means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from adapters.aliases import MAX_SHARES, checked_weights, rolled_back
from adapters.errors import NotFound
from adapters.function_changes import check_generation
from adapters.functions import FunctionRecord
from adapters.names import NAME_RULE, is_alias
from adapters.nearest import did_you_mean
from gateway.groups import Catalog
from gateway.http.bodies import read_message
from gateway.http.errors import invalid
from gateway.http.params import etag, flag, if_match
from gateway.http.responses import json_response
from gateway.http.routing import Routes
from gateway.residency.warm_on_deploy import WARM, warm_targets

routes = Routes(Catalog)

VersionNumber = Annotated[int, Meta(ge=1, le=999_999_999)]
VersionText = Annotated[str, Meta(pattern="^[1-9][0-9]{0,8}$")]


class AliasTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Target of an alias: exactly one of `version` and `weights`. `weights` maps each version to its share of the
    calls; the shares sum to 1."""

    version: VersionNumber | None = None
    weights: (
        Annotated[dict[VersionText, Annotated[float, Meta(ge=0, le=1)]], Meta(min_length=1, max_length=MAX_SHARES)]
        | None
    ) = None


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to point an alias to its previous target again."""

    alias: str = "latest"


class AliasPast(msgspec.Struct, frozen=True):
    """Earlier target of an alias, which it had from `since` on."""

    version: int | None
    weights: dict[str, float]
    since: float


class AliasReply(msgspec.Struct, frozen=True):
    """Current target of an alias. `version` is null while the alias splits its calls between several versions."""

    function: str
    alias: str
    version: int | None
    weights: dict[str, float]
    since: float
    changes: int
    generation: int
    history: list[AliasPast]
    """Earlier targets, the latest first."""
    warnings: list[str] = []


@routes.tenant(
    "GET /functions/{name}/aliases/{alias}",
    "Where an alias points, and where it pointed before",
    {200: AliasReply},
    etag=True,
)
async def get_alias(request: Request, catalog: Catalog, tenant: str) -> Response:
    record = await catalog.threads.read(catalog.registry.function, tenant, request.path_params["name"])
    return _reply(record, request.path_params["alias"])


@routes.tenant(
    "PUT /functions/{name}/aliases/{alias}",
    "Point an alias, new or known, to a version, or split its calls between some",
    {200: AliasReply},
    parameters=(WARM,),
    body=AliasTarget,
    errors=(409,),
    etag=True,
    if_match=True,
)
async def put_alias(request: Request, catalog: Catalog, tenant: str) -> Response:
    name, moved = request.path_params["name"], request.path_params["alias"]
    target = await read_message(request, catalog.config, AliasTarget)
    if (target.version is None) == (target.weights is None):
        raise invalid("version", "send exactly one of version and weights")
    if not is_alias(moved):
        raise NotFound(f"there is no alias {moved[:100]!r}: an alias has {NAME_RULE}, not all of them digits")
    weights = {str(target.version): 1.0} if target.weights is None else checked_weights(target.weights)
    matches, warnings = if_match(request), list[str]()
    if flag(request, "warm"):
        check_generation(await catalog.threads.read(catalog.registry.function, tenant, name), matches)
        warnings = await warm_targets(catalog.warming, tenant, name, weights)
    record = await catalog.functions.change(catalog.registry.changes.set_alias, tenant, name, moved, weights, matches)
    return _reply(record, moved, warnings)


@routes.tenant(
    "POST /functions/{name}/rollback",
    "Point an alias to what it pointed to before",
    {200: AliasReply},
    parameters=(WARM,),
    body=Rollback,
    errors=(409,),
    etag=True,
    if_match=True,
)
async def roll_back(request: Request, catalog: Catalog, tenant: str) -> Response:
    name = request.path_params["name"]
    rollback = await read_message(request, catalog.config, Rollback, absent=b"{}")
    matches, warnings = if_match(request), list[str]()
    if flag(request, "warm"):
        warnings = await _warm_earlier(catalog, tenant, name, rollback.alias, matches)
    record = await catalog.functions.change(catalog.registry.changes.roll_back, tenant, name, rollback.alias, matches)
    return _reply(record, rollback.alias, warnings)


async def _warm_earlier(
    catalog: Catalog, tenant: str, name: str, alias: str, matches: frozenset[int] | None
) -> list[str]:
    """Warms the versions to which a rollback would point. Returns warnings as warm_targets does.

    If there is no earlier target, the rollback itself reports that.
    """
    record = await catalog.threads.read(catalog.registry.function, tenant, name)
    check_generation(record, matches)
    current = record.aliases.get(alias)
    if current is None:
        return []
    weights = rolled_back(current, record.numbers(), current.when).weights
    return await warm_targets(catalog.warming, tenant, name, weights)


def _reply(record: FunctionRecord, name: str, warnings: Sequence[str] = ()) -> Response:
    alias = record.aliases.get(name)
    if alias is None:
        hint = did_you_mean(name, record.aliases)
        raise NotFound(f"function {record.name} has no alias {name[:100]!r}{hint}")
    reply = AliasReply(
        function=record.name,
        alias=name,
        version=only_version(alias.weights),
        weights=alias.weights,
        since=alias.when,
        changes=alias.generation,
        generation=record.generation,
        history=[AliasPast(only_version(past.weights), past.weights, past.when) for past in reversed(alias.history)],
        warnings=list(warnings),
    )
    return json_response(reply, headers={"etag": etag(record.generation)})


def only_version(weights: dict[str, float]) -> int | None:
    """Returns the version that gets all calls; None if several versions share them."""
    return int(next(iter(weights))) if len(weights) == 1 else None
