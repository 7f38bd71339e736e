"""Routes /v1: models, completions and chat completions, for OpenAI's clients."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from adapters.functions import FunctionRecord
from cluster.text import BaseText
from gateway.api import openai_schema as openai
from gateway.api import schema
from gateway.calls.openai_reply import Head, chunks, failure, full_reply
from gateway.calls.prompts import Source, prompts_of
from gateway.calls.reply import collect, invocation_headers
from gateway.calls.request import Invocation
from gateway.calls.tools import conversation_of, form_of, opened_reasoning
from gateway.calls.unsupported_fields import (
    CHAT_UNSUPPORTED,
    PROMPT_UNSUPPORTED,
    UNSUPPORTED,
    Unsupported,
    supported_fields,
)
from gateway.groups import Calls
from gateway.http.bodies import convert, parse_json, read_call_body
from gateway.http.connected import while_connected
from gateway.http.errors import invalid
from gateway.http.event_stream import BLANK_LINE, EventStream
from gateway.http.rates import READ_MANY
from gateway.http.responses import json_response
from gateway.http.routing import Routes, parameter
from gateway.http.stopwatch import Stopwatch

routes = Routes(Calls)

PAGE = 1000
MAX_PAGES = 10
"""Maximum pages of functions that are read for the list of models. OpenAI's API returns this list without pages."""

T = TypeVar("T", bound=openai.Shared)


@routes.tenant("GET /v1/models", "The base model and the tenant's functions", {200: openai.ModelList}, rate=READ_MANY)
async def list_models(_: Request, calls: Calls, tenant: str) -> Response:
    records: list[FunctionRecord] = []
    after: str | None = ""
    for _page in range(MAX_PAGES):
        page, after = await calls.threads.read(calls.registry.functions, tenant, after or "", PAGE)
        records += [record for record in page if isinstance(record, FunctionRecord)]  # damaged ones can't be called
        if after is None:
            break
    context = await calls.inputs.served_context()
    models = [_model(calls, record, record.name, tenant, context) for record in records]
    return json_response(openai.ModelList([_base(calls, context), *models]))


@routes.tenant(
    "GET /v1/models/{id:path}",
    "One of them",
    {200: openai.Model},
    parameters=(parameter("path", "id", "As `model` in a completion"),),
)
async def get_model(request: Request, calls: Calls, tenant: str) -> Response:
    model_id = request.path_params["id"]
    context = await calls.inputs.served_context()
    if model_id == calls.inputs.base.id:
        return json_response(_base(calls, context))
    name, qualifier = calls.inputs.split_model(model_id)
    await calls.inputs.functions.choices(tenant, name, qualifier)
    record = await calls.threads.read(calls.registry.function, tenant, name)
    return json_response(_model(calls, record, model_id, tenant, context))


@routes.call(
    "POST /v1/completions",
    "Complete a prompt",
    {200: openai.Completion},
    limits=("tokens_per_minute", "concurrent"),
    body=openai.CompletionRequest,
    stream="Completion chunks, then `data: [DONE]`",
)
async def create_completion(request: Request, calls: Calls, tenant: str, watch: Stopwatch) -> ASGIApp:
    call = await _read(request, calls, watch, openai.CompletionRequest, UNSUPPORTED | PROMPT_UNSUPPORTED)
    source = prompts_of(call.prompt, calls.inputs.base.vocab_size)
    if len(source.prompts) * (call.n or 1) > schema.MAX_GENERATIONS:
        raise invalid("n", f"prompts times n may be at most {schema.MAX_GENERATIONS}; send several calls")
    return await _answer(request, calls, tenant, watch, call, source)


@routes.call(
    "POST /v1/chat/completions",
    "Answer a conversation",
    {200: openai.Chat},
    limits=("tokens_per_minute", "concurrent"),
    body=openai.ChatRequest,
    stream="ChatChunk chunks, then `data: [DONE]`",
)
async def create_chat_completion(request: Request, calls: Calls, tenant: str, watch: Stopwatch) -> ASGIApp:
    call = await _read(request, calls, watch, openai.ChatRequest, UNSUPPORTED | CHAT_UNSUPPORTED)
    if call.top_logprobs and not call.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    if None not in (call.max_tokens, call.max_completion_tokens) and call.max_tokens != call.max_completion_tokens:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ")
    return await _answer(request, calls, tenant, watch, call, conversation_of(call))


async def _read(request: Request, calls: Calls, watch: Stopwatch, kind: type[T], unserved: dict[str, Unsupported]) -> T:
    """Returns the validated body of a completion. Raises ServiceError."""
    data = await read_call_body(request, calls.config)
    call = convert(supported_fields(parse_json(data), unserved, openai.HARMLESS), kind)
    if call.prompt_logprobs is not None and call.stream:
        why = "prompt_logprobs come with whole replies only; leave out stream, or use echo with logprobs"
        raise invalid("prompt_logprobs", why)
    watch.lap("body")
    return call


async def _answer(
    request: Request, calls: Calls, tenant: str, watch: Stopwatch, call: openai.Shared, source: Source
) -> ASGIApp:
    function = calls.inputs.split_model(call.model)
    invocation = await calls.inputs.prepare(request, tenant, watch, function=function, source=source, stated=call)
    head = _head(invocation, call, calls.inputs.text)
    generations = calls.dispatcher.generations(invocation)
    headers = partial(invocation_headers, generations[0])
    if call.stream:
        return EventStream(chunks(head, generations), headers, failure, calls.config, keepalive=BLANK_LINE)
    outcomes = await while_connected(collect(generations), request.receive)
    return json_response(full_reply(head, outcomes), headers=headers())


def _head(invocation: Invocation, call: openai.Shared, text: BaseText) -> Head:
    form = form_of(call, invocation, text)
    streamed = call.stream_options or openai.StreamOptions()
    return Head(
        id=invocation.id,
        model=call.model,
        chat=isinstance(call, openai.ChatRequest),
        logprobs=call.top_logprob_count is not None,
        include_usage=bool(streamed.include_usage),
        choices=invocation.choices,
        top_logprob_count=call.top_logprob_count or 0,
        echo=invocation.echo,
        form=form,
        opened=opened_reasoning(invocation, text) if form is not None and form.reasoning else [],
        prompt_logprobs=call.prompt_logprobs is not None,
        continuous_usage=bool(streamed.include_usage and streamed.continuous_usage_stats),
        prompt_token_ids=[each.token_ids for each in invocation.requests] if invocation.returns_token_ids else [],
    )


def _base(calls: Calls, context: int) -> openai.Model:
    return openai.Model(calls.inputs.base.id, 0, "garnish", calls.inputs.base.id, None, context)


def _model(calls: Calls, record: FunctionRecord, model_id: str, tenant: str, context: int) -> openai.Model:
    return openai.Model(model_id, int(record.created), tenant, record.name, calls.inputs.base.id, context)
