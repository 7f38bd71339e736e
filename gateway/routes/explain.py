"""GET /explain/{id}: how a call was placed. For its tenant, and for admin keys."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import NotFound
from gateway.calls.explanations import ExplainReply
from gateway.groups import Calls
from gateway.http.params import TENANT_HEADER
from gateway.http.responses import json_response
from gateway.http.routing import TENANT, Caller, Routes, parameter

routes = Routes(Calls)
_ID = parameter("path", "id", "The call's id, or the x-request-id of its reply", {"type": "string", "maxLength": 200})


@routes.caller(
    "GET /explain/{id}",
    "How a call was placed: candidates, forecasts, choice; its tenant's key, or an admin key",
    {200: ExplainReply},
    parameters=(_ID, TENANT),
    errors=(400,),
)
async def explain(request: Request, calls: Calls, caller: Caller) -> Response:
    named = TENANT_HEADER in request.headers
    whose = None if caller.admin and not named else await calls.callers.tenant(request)
    wanted = request.path_params["id"]
    found = calls.dispatcher.router.explanations.find(wanted, whose)
    if found is not None:
        return json_response(found.reply())
    told = await calls.peers.explain(wanted, whose)
    if told is None:
        # Another tenant's call answers the same.
        raise NotFound(f"no call {wanted[:100]!r} is remembered; the latest few thousand are")
    return json_response(msgspec.json.decode(told, type=ExplainReply))
