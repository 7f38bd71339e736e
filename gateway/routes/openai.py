"""/v1: models, completions and chat completions, for OpenAI's clients."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from adapters.functions import FunctionRecord
from gateway.api import openai_schema as openai
from gateway.api import schema
from gateway.calls.choices import collect
from gateway.calls.invocation import Invocation
from gateway.calls.model_names import split_model
from gateway.calls.openai_reply import Head, chunks, failure, whole
from gateway.calls.prepare import prepare, served_context
from gateway.calls.prompts import Conversation, Source, prompts_of
from gateway.calls.reply import invocation_headers
from gateway.calls.unserved import CHAT_UNSERVED, UNSERVED, Unserved, served_fields
from gateway.http.bodies import convert, parse_json, read_call_body
from gateway.http.connected import while_connected
from gateway.http.errors import invalid
from gateway.http.event_stream import BLANK_LINE, EventStream
from gateway.http.responses import json_response
from gateway.http.routing import Routes, parameter
from gateway.http.stopwatch import Stopwatch
from gateway.services import Services

routes = Routes()

PAGE = 1000
MAX_PAGES = 10
"""OpenAI's list of models has no pages, so it ends somewhere."""

T = TypeVar("T", bound=openai.Shared)


@routes.tenant("GET /v1/models", "The base model and the tenant's functions", {200: openai.ModelList})
async def list_models(_: Request, services: Services, tenant: str) -> Response:
    records: list[FunctionRecord] = []
    after: str | None = ""
    for _page in range(MAX_PAGES):
        page, after = await services.threads.read(services.registry.functions, tenant, after or "", PAGE)
        records += [record for record in page if isinstance(record, FunctionRecord)]  # a broken one can't be called
        if after is None:
            break
    context = await served_context(services)
    models = [_model(services, record, record.name, tenant, context) for record in records]
    return json_response(openai.ModelList([_base(services, context), *models]))


@routes.tenant(
    "GET /v1/models/{id:path}",
    "One of them",
    {200: openai.Model},
    parameters=(parameter("path", "id", "As `model` in a completion"),),
)
async def get_model(request: Request, services: Services, tenant: str) -> Response:
    asked = request.path_params["id"]
    context = await served_context(services)
    if asked == services.base.id:
        return json_response(_base(services, context))
    name, qualifier = split_model(services, asked)
    await services.functions.choices(tenant, name, qualifier)
    record = await services.threads.read(services.registry.function, tenant, name)
    return json_response(_model(services, record, asked, tenant, context))


@routes.call(
    "POST /v1/completions",
    "Complete a prompt",
    {200: openai.Completion},
    body=openai.CompletionRequest,
    stream="Completion chunks, then `data: [DONE]`",
)
async def create_completion(request: Request, services: Services, tenant: str, watch: Stopwatch) -> ASGIApp:
    call = await _read(request, services, watch, openai.CompletionRequest, UNSERVED)
    source = prompts_of(call.prompt, services.base.vocab_size)
    if len(source.prompts) * (call.n or 1) > schema.MAX_GENERATIONS:
        raise invalid("n", f"prompts times n may be at most {schema.MAX_GENERATIONS}; send several calls")
    return await _answer(request, services, tenant, watch, call, source)


@routes.call(
    "POST /v1/chat/completions",
    "Answer a conversation",
    {200: openai.Chat},
    body=openai.ChatRequest,
    stream="ChatChunk chunks, then `data: [DONE]`",
)
async def create_chat_completion(request: Request, services: Services, tenant: str, watch: Stopwatch) -> ASGIApp:
    call = await _read(request, services, watch, openai.ChatRequest, UNSERVED | CHAT_UNSERVED)
    if call.top_logprobs is not None and not call.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    if None not in (call.max_tokens, call.max_completion_tokens) and call.max_tokens != call.max_completion_tokens:
        raise invalid("max_tokens", "max_tokens and max_completion_tokens differ")
    source = Conversation([message.plain() for message in call.messages])
    return await _answer(request, services, tenant, watch, call, source)


async def _read(
    request: Request, services: Services, watch: Stopwatch, kind: type[T], unserved: dict[str, Unserved]
) -> T:
    """The checked body."""
    data = await read_call_body(request, services.config)
    call = convert(served_fields(parse_json(data), unserved, openai.HARMLESS), kind)
    if call.prompt_logprobs is not None and call.stream:
        why = "prompt_logprobs come with whole replies only; leave out stream, or use echo with logprobs"
        raise invalid("prompt_logprobs", why)
    watch.lap("body")
    return call


async def _answer(
    request: Request, services: Services, tenant: str, watch: Stopwatch, call: openai.Shared, source: Source
) -> ASGIApp:
    named = split_model(services, call.model)
    invocation = await prepare(request, services, tenant, watch, named=named, source=source, stated=call)
    head = _head(invocation, call)
    generations = services.dispatcher.generations(invocation)
    headers = partial(invocation_headers, generations[0])
    if call.stream:
        return EventStream(chunks(head, generations), headers, failure, services.config, keepalive=BLANK_LINE)
    outcomes = await while_connected(collect(generations), request.receive)
    return json_response(whole(head, outcomes), headers=headers())


def _head(invocation: Invocation, call: openai.Shared) -> Head:
    streamed = call.stream_options or openai.StreamOptions()
    return Head(
        id=invocation.id,
        model=call.model,
        chat=isinstance(call, openai.ChatRequest),
        logprobs=call.alternatives is not None,
        include_usage=bool(streamed.include_usage),
        choices=invocation.choices,
        alternatives=call.alternatives or 0,
        echo=invocation.echo,
        prompt_logprobs=call.prompt_logprobs is not None,
        continuous_usage=bool(streamed.include_usage and streamed.continuous_usage_stats),
    )


def _base(services: Services, context: int) -> openai.Model:
    return openai.Model(services.base.id, 0, "garnish", services.base.id, None, context)


def _model(services: Services, record: FunctionRecord, model_id: str, tenant: str, context: int) -> openai.Model:
    return openai.Model(model_id, int(record.created), tenant, record.name, services.base.id, context)
