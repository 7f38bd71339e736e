"""GET /explain/{id}: how a call was placed. For whoever made it, and for admin keys."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import NotFound
from gateway.api.explain_schema import ExplainReply, reply_of
from gateway.catalog.callers import TENANT_HEADER
from gateway.http.params import known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.services import services_of


async def explain(request: Request) -> Response:
    services = services_of(request)
    caller = await services.callers.caller(request)
    named = TENANT_HEADER in request.headers
    whose = None if caller.admin and not named else await services.callers.tenant(request)
    known_only(request)
    wanted = request.path_params["id"]
    found = await services.explanations.find(wanted, whose)
    if found is not None:
        return json_response(reply_of(found))
    told = await services.peers.ask(wanted, whose)
    if told is None:
        # Another tenant's call answers the same.
        raise NotFound(f"no call {wanted[:100]!r} is remembered; the latest few thousand are")
    return json_response(msgspec.json.decode(told, type=ExplainReply))


routes = [ExactRoute("/explain/{id}", explain, methods=["GET"])]
