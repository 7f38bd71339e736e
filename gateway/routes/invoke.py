"""POST /invoke/{name}: generates text, as JSON, as a stream, or as an asynchronous call.

An alias or a version is stated as /invoke/{name}:{alias-or-version} or `?qualifier=`.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.api import schema
from gateway.calls.prompts import source_of
from gateway.calls.reply import collect, invocation_headers, invoke_events, invoke_failure, invoke_reply
from gateway.calls.unsupported_fields import PROMPT_UNSUPPORTED, UNSUPPORTED, supported_fields
from gateway.events.calls import IDEMPOTENCY_HEADER
from gateway.events.messages import EventReply, reply_of
from gateway.groups import Calls
from gateway.http.bodies import convert, parse_json, read_call_body
from gateway.http.connected import while_connected
from gateway.http.errors import invalid
from gateway.http.event_stream import EventStream
from gateway.http.params import asks_for_events
from gateway.http.responses import json_response
from gateway.http.routing import Routes, parameter
from gateway.http.stopwatch import Stopwatch

routes = Routes(Calls)

TYPE_HEADER = "x-invocation-type"


@routes.call(
    "POST /invoke/{target:path}",
    "Generate text with a function",
    {200: schema.InvokeReply, 202: EventReply},
    parameters=(
        parameter("path", "target", "`name`, `name:alias`, `name:version`, or the base model's id"),
        parameter("query", "qualifier", "Alias or version, if the path names none"),
        parameter("header", TYPE_HEADER, "`Event`: as `background` in the body; `RequestResponse`: the caller waits"),
        parameter("header", IDEMPOTENCY_HEADER, "Of an asynchronous call: the same one again is answered with it"),
    ),
    errors=(409,),
    limits=("tokens_per_minute", "concurrent", "stored_calls", "stored_call_bytes"),
    body=schema.InvokeRequest,
    stream="Events `token` (TokenEvent), then one `done` (DoneEvent), or `error` (ErrorReply)",
)
async def invoke(request: Request, calls: Calls, tenant: str, watch: Stopwatch) -> ASGIApp:
    data = await read_call_body(request, calls.config)
    call = convert(supported_fields(parse_json(data), UNSUPPORTED | PROMPT_UNSUPPORTED), schema.InvokeRequest)
    watch.lap("body")
    function = _name_and_qualifier(request)
    if _is_event(request, call):
        event = await calls.event_calls.accept(request, tenant, watch, function=function, call=call)
        return json_response(reply_of(event), 202, {"location": f"/invocations/{event.id}"})
    source = source_of(call, calls.inputs.base.vocab_size)
    invocation = await calls.inputs.prepare(request, tenant, watch, function=function, source=source, stated=call)
    generations = calls.dispatcher.generations(invocation)
    headers = partial(invocation_headers, generations[0])
    if call.stream or asks_for_events(request.headers.get("accept", "")):
        return EventStream(invoke_events(generations), headers, invoke_failure, calls.config)
    outcomes = await while_connected(collect(generations), request.receive)
    return json_response(invoke_reply(generations, outcomes), headers=headers())


def _is_event(request: Request, call: schema.InvokeRequest) -> bool:
    """Returns whether the call is asynchronous. Raises ServiceError for options that contradict that."""
    stated = request.headers.get(TYPE_HEADER, "")
    if stated.lower() not in ("", "event", "requestresponse"):
        raise invalid(TYPE_HEADER, f"{TYPE_HEADER} must be Event or RequestResponse")
    event = call.background or stated.lower() == "event"
    if event and call.stream:
        raise invalid("stream", "an asynchronous call has no stream")
    if not event and (call.on_success or call.on_failure):
        field = "on_success" if call.on_success else "on_failure"
        raise invalid(field, f"{field} needs an asynchronous call: set background")
    return event


def _name_and_qualifier(request: Request) -> tuple[str, str | None]:
    name, colon, qualifier = request.path_params["target"].partition(":")
    stated = request.query_params.get("qualifier")
    if colon and stated is not None and stated != qualifier:
        raise invalid("qualifier", "qualifier must equal the qualifier in the path, or be absent")
    if colon:
        return name, qualifier or ":"  # an empty qualifier is invalid, unlike a missing one
    return name, stated
