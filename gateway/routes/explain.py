"""GET /explain/{id}: how a call's generations were routed to nodes. The call's tenant and admin keys may use it."""

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
    "How a call was routed: candidates, forecasts, choice; its tenant's key, or an admin key",
    {200: ExplainReply},
    parameters=(_ID, TENANT),
    errors=(400,),
)
async def explain(request: Request, calls: Calls, caller: Caller) -> Response:
    names_tenant = TENANT_HEADER in request.headers
    tenant = None if caller.admin and not names_tenant else await calls.callers.tenant(request)
    id = request.path_params["id"]
    explained = calls.dispatcher.router.explanations.find(id, tenant)
    if explained is not None:
        return json_response(explained.reply())
    reply = await calls.peers.explain(id, tenant)
    if reply is None:
        # The reply is the same for another tenant's call.
        raise NotFound(f"call {id[:100]!r} is not known: only the latest few thousand calls are kept")
    return json_response(msgspec.json.decode(reply, type=ExplainReply))
