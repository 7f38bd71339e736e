"""/v1: models, completions and chat completions, for OpenAI's clients."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from adapters.functions import FunctionRecord
from cluster.errors import ServiceError
from gateway.api import openai_schema as openai
from gateway.api import schema
from gateway.calls.choices import collect
from gateway.calls.invocation import Invocation, prepare, served_context
from gateway.calls.model_names import split_model
from gateway.calls.openai_reply import Head, chunks, failure, whole
from gateway.calls.parameters import Options, stated
from gateway.calls.prompts import Conversation, prompts_of
from gateway.calls.reply import invocation_headers
from gateway.calls.unserved import CHAT_UNSERVED, UNSERVED, Unserved, served_fields
from gateway.http.bodies import convert, parse_json, read_call_body
from gateway.http.connected import while_connected
from gateway.http.event_stream import BLANK_LINE, EventStream
from gateway.http.params import side
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
        why = f"prompts times n may be at most {schema.MAX_GENERATIONS}; send several calls"
        raise ServiceError("validation_failed", why, param="n")
    target = await services.functions.target(tenant, *split_model(services, call.model), side(request))
    watch.lap("resolve")
    invocation = await prepare(
        services,
        tenant=tenant,
        target=target,
        source=source,
        options=_options(call, logprobs=call.logprobs, echo=bool(call.echo)),
        watch=watch,
        receive=request.receive,
        request_id=request.state.request_id,
    )
    return await _answer(services, invocation, request, call, _head(invocation, call, False, call.logprobs is not None))


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
        raise ServiceError("validation_failed", "top_logprobs needs logprobs: true", param="top_logprobs")
    if None not in (call.max_tokens, call.max_completion_tokens) and call.max_tokens != call.max_completion_tokens:
        raise ServiceError("validation_failed", "max_tokens and max_completion_tokens differ", param="max_tokens")
    target = await services.functions.target(tenant, *split_model(services, call.model), side(request))
    watch.lap("resolve")
    invocation = await prepare(
        services,
        tenant=tenant,
        target=target,
        source=Conversation([message.plain() for message in call.messages]),
        options=_options(
            call,
            max_tokens=call.max_completion_tokens or call.max_tokens,
            logprobs=(call.top_logprobs or 0) if call.logprobs else None,
            max_tokens_field="max_tokens" if call.max_completion_tokens is None else "max_completion_tokens",
        ),
        watch=watch,
        receive=request.receive,
        request_id=request.state.request_id,
    )
    return await _answer(services, invocation, request, call, _head(invocation, call, True, bool(call.logprobs)))


async def _read(
    request: Request, services: Services, watch: Stopwatch, kind: type[T], unserved: dict[str, Unserved]
) -> T:
    """The checked body."""
    data = await read_call_body(request, services.config)
    call = convert(served_fields(parse_json(data), unserved, openai.HARMLESS), kind)
    if call.prompt_logprobs is not None and call.stream:
        why = "prompt_logprobs come with whole replies only; leave out stream, or use echo with logprobs"
        raise ServiceError("validation_failed", why, param="prompt_logprobs")
    watch.lap("body")
    return call


async def _answer(
    services: Services, invocation: Invocation, request: Request, call: openai.Shared, head: Head
) -> ASGIApp:
    generations = services.dispatcher.generations(invocation)
    if not call.stream:
        outcomes = await while_connected(collect(generations), request.receive)
        return json_response(whole(head, outcomes), headers=invocation_headers(invocation, generations[0]))
    request_id = request.state.request_id
    return EventStream(
        chunks(head, generations),
        headers=lambda: invocation_headers(invocation, generations[0]),
        failure=lambda error: failure(error, request_id),
        header_seconds=services.config.header_seconds,
        keepalive_seconds=services.config.keepalive_seconds,
        keepalive=BLANK_LINE,
    )


def _head(invocation: Invocation, call: openai.Shared, chat: bool, logprobs: bool) -> Head:
    streamed = call.stream_options or openai.StreamOptions()
    return Head(
        id=invocation.id,
        model=call.model,
        chat=chat,
        logprobs=logprobs,
        include_usage=bool(streamed.include_usage),
        choices=invocation.choices,
        alternatives=invocation.requests[0].sampling.logprobs or 0,
        echo=invocation.echo,
        prompt_logprobs=call.prompt_logprobs is not None,
        continuous_usage=bool(streamed.include_usage and streamed.continuous_usage_stats),
    )


def _options(call: openai.Shared, **own: Any) -> Options:
    # OpenAI's seeds may be negative; nodes take 63 bits.
    seed = None if call.seed is None else call.seed & ((1 << 63) - 1)
    return Options(**{**stated(call), "seed": seed, **own})


def _base(services: Services, context: int) -> openai.Model:
    return openai.Model(services.base.id, 0, "garnish", services.base.id, None, context)


def _model(services: Services, record: FunctionRecord, model_id: str, tenant: str, context: int) -> openai.Model:
    return openai.Model(model_id, int(record.created), tenant, record.name, services.base.id, context)
