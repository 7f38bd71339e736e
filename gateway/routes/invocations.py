"""Routes /invocations: a tenant's asynchronous calls; /dead-letters: those that failed permanently."""

from __future__ import annotations

from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from gateway.events.messages import EventList, EventReply, RedriveReply, item_of, reply_of
from gateway.events.records import DEAD_STATES, LISTED_STATES, State
from gateway.groups import Calls
from gateway.http.errors import invalid
from gateway.http.params import integer
from gateway.http.rates import READ_MANY
from gateway.http.responses import json_response
from gateway.http.routing import Routes, parameter

routes = Routes(Calls)

MAX_LIMIT = 100
STATES: tuple[State, ...] = get_args(State)
FUNCTION = parameter("query", "function", "Those of this function alone")
PAGE = (
    parameter("query", "after", "`next` of the page before"),
    parameter(
        "query", "limit", "Entries of a page", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": 20}
    ),
)


@routes.tenant(
    "GET /invocations",
    "A tenant's asynchronous calls",
    {200: EventList},
    parameters=(
        FUNCTION,
        parameter("query", "state", "Those in this state alone", {"type": "string", "enum": list(STATES)}),
        *PAGE,
    ),
    rate=READ_MANY,
)
async def list_invocations(request: Request, calls: Calls, tenant: str) -> Response:
    state = request.query_params.get("state")
    if state is not None and state not in STATES:
        raise invalid("state", f"state must be one of {', '.join(STATES)}")
    states = LISTED_STATES if state is None else (state,)
    return json_response(await _page(request, calls, tenant, states))


@routes.tenant("GET /invocations/{id}", "An asynchronous call: its state, attempts and result", {200: EventReply})
async def get_invocation(request: Request, calls: Calls, tenant: str) -> Response:
    return json_response(reply_of(await calls.events.get(tenant, request.path_params["id"])))


@routes.tenant(
    "DELETE /invocations/{id}", "Cancel an asynchronous call that has not ended", {200: EventReply}, errors=(409,)
)
async def cancel_invocation(request: Request, calls: Calls, tenant: str) -> Response:
    return json_response(reply_of(await calls.events.cancel(tenant, request.path_params["id"])))


@routes.tenant(
    "GET /dead-letters",
    "A tenant's asynchronous calls that failed for good, and why",
    {200: EventList},
    parameters=(FUNCTION, *PAGE),
    rate=READ_MANY,
)
async def list_dead_letters(request: Request, calls: Calls, tenant: str) -> Response:
    return json_response(await _page(request, calls, tenant, DEAD_STATES))


@routes.tenant(
    "POST /dead-letters/{id}/redrive", "Queue a dead letter again, as if it were new", {202: EventReply}, errors=(409,)
)
async def redrive_dead_letter(request: Request, calls: Calls, tenant: str) -> Response:
    event = await calls.events.redrive(tenant, request.path_params["id"])
    return json_response(reply_of(event), 202, {"location": f"/invocations/{event.id}"})


@routes.tenant(
    "POST /dead-letters/redrive",
    "Queue dead letters again, up to 500 with one call",
    {202: RedriveReply},
    parameters=(FUNCTION,),
)
async def redrive_dead_letters(request: Request, calls: Calls, tenant: str) -> Response:
    count, more = await calls.events.redrive_all(tenant, request.query_params.get("function"))
    return json_response(RedriveReply(count, more), 202)


async def _page(request: Request, calls: Calls, tenant: str, states: tuple[State, ...]) -> EventList:
    function, after = request.query_params.get("function"), request.query_params.get("after", "")
    limit = integer(request, "limit", 20, 1, MAX_LIMIT)
    page = await calls.events.list(tenant, states, function, after, limit)
    return EventList([item_of(event) for event in page.events], page.after)
