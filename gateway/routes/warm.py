"""POST /functions/{name}/warm, GET /functions/{name}/forecast: loading of adapters on nodes before they are called."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.groups import Catalog
from gateway.http.bodies import read_message
from gateway.http.responses import json_response
from gateway.http.routing import NAME_PATTERN, Routes
from gateway.residency.messages import MAX_COPIES, ForecastReply, Tier, WarmOrder, WarmReply

routes = Routes(Catalog)


class Warm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request to load a function's adapters on nodes. `version` is a number or an alias; null means `latest`. If the
    alias splits its calls, all of its versions are loaded."""

    tier: Tier = "device"
    copies: Annotated[int, Meta(ge=1, le=MAX_COPIES)] = 1
    """Number of nodes that load each version. If fewer nodes serve the model, all of them load it."""
    version: Annotated[str, Meta(pattern=NAME_PATTERN, max_length=64)] | None = None


@routes.tenant(
    "POST /functions/{name}/warm",
    "Bring what calls of a function would run to its nodes now, and keep it wanted there for 5 minutes",
    {202: WarmReply},
    body=Warm,
    errors=(413, 502, 504),
)
async def warm(request: Request, catalog: Catalog, tenant: str) -> Response:
    name, body = request.path_params["name"], await read_message(request, catalog.config, Warm, absent=b"{}")
    versions = await catalog.warming.versions(tenant, name, body.version)
    order = WarmOrder(tenant, name, versions, body.tier, body.copies)
    return json_response(await catalog.warming.warm(order), 202)


@routes.tenant(
    "GET /functions/{name}/forecast",
    "Whether calls of a function are expected soon, and which nodes are asked to have it ready",
    {200: ForecastReply},
)
async def get_forecast(request: Request, catalog: Catalog, tenant: str) -> Response:
    record = await catalog.threads.read(catalog.registry.function, tenant, request.path_params["name"])
    return json_response(await catalog.residency.forecast_of(tenant, record.name))
