"""/v1: models, completions and chat completions, for OpenAI's clients."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from adapters.functions import FunctionRecord
from cluster.errors import ServiceError
from gateway import openai_schema as openai
from gateway.bodies import convert, parse_json, read_call_body
from gateway.choices import collect
from gateway.connected import while_connected
from gateway.event_stream import EventStream
from gateway.invocation import Invocation, Options, prepare
from gateway.openai_reply import Head, chunks, failure, whole
from gateway.params import known_only, side
from gateway.prompts import Conversation, Prompts
from gateway.reply import invocation_headers
from gateway.responses import json_response
from gateway.routing import ExactRoute
from gateway.services import Services, services_of
from gateway.stopwatch import Stopwatch

PAGE = 1000
MAX_PAGES = 10
"""OpenAI's list of models has no pages, so it ends somewhere."""

T = TypeVar("T", bound=openai.Shared)


async def list_models(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    records: list[FunctionRecord] = []
    after: str | None = ""
    for _ in range(MAX_PAGES):
        page, after = await services.threads.read(services.registry.functions, tenant, after or "", PAGE)
        records += page
        if after is None:
            break
    made = [openai.Model(record.name, int(record.created), tenant) for record in records]
    return json_response(openai.ModelList([_base(services), *made]))


async def get_model(request: Request) -> Response:
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    asked = request.path_params["id"]
    if asked == services.base.id:
        return json_response(_base(services))
    name, qualifier = _split(services, asked)
    await services.functions.choices(tenant, name, qualifier)
    record = await services.threads.read(services.registry.function, tenant, name)
    return json_response(openai.Model(asked, int(record.created), tenant))


async def completions(request: Request) -> ASGIApp:
    watch, services = Stopwatch(), services_of(request)
    tenant, call = await _read(request, services, watch, openai.CompletionRequest)
    prompts = [call.prompt] if isinstance(call.prompt, str) else call.prompt
    if len(prompts) * (call.n or 1) > openai.MAX_CHOICES:
        raise ServiceError("validation_failed", f"prompts times n may be at most {openai.MAX_CHOICES}", param="n")
    target = await services.functions.target(tenant, *_split(services, call.model), side(request))
    watch.lap("resolve")
    invocation = await prepare(
        services,
        tenant=tenant,
        target=target,
        source=Prompts(prompts),
        options=_options(call, max_tokens=call.max_tokens, logprobs=call.logprobs),
        watch=watch,
        receive=request.receive,
        choices=call.n or 1,
        request_id=request.state.request_id,
    )
    return await _answer(services, invocation, request, call, _head(invocation, call, False, call.logprobs is not None))


async def chat_completions(request: Request) -> ASGIApp:
    watch, services = Stopwatch(), services_of(request)
    tenant, call = await _read(request, services, watch, openai.ChatRequest)
    if call.top_logprobs is not None and not call.logprobs:
        raise ServiceError("validation_failed", "top_logprobs needs logprobs: true", param="top_logprobs")
    if None not in (call.max_tokens, call.max_completion_tokens) and call.max_tokens != call.max_completion_tokens:
        raise ServiceError("validation_failed", "max_tokens and max_completion_tokens differ", param="max_tokens")
    target = await services.functions.target(tenant, *_split(services, call.model), side(request))
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
        choices=call.n or 1,
        request_id=request.state.request_id,
    )
    return await _answer(services, invocation, request, call, _head(invocation, call, True, bool(call.logprobs)))


async def _read(request: Request, services: Services, watch: Stopwatch, kind: type[T]) -> tuple[str, T]:
    """The caller's tenant and the checked body."""
    tenant = await services.callers.tenant(request)
    watch.lap("auth")
    known_only(request)
    data = await read_call_body(request, services.config)
    call = convert(openai.served_fields(parse_json(data)), kind)
    if call.stream_options is not None and not call.stream:
        raise ServiceError("validation_failed", "stream_options needs stream: true", param="stream_options")
    watch.lap("body")
    return tenant, call


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
    )


def _head(invocation: Invocation, call: openai.Shared, chat: bool, logprobs: bool) -> Head:
    return Head(
        id=invocation.id,
        model=call.model,
        chat=chat,
        logprobs=logprobs,
        include_usage=bool(call.stream_options and call.stream_options.include_usage),
        choices=call.n or 1,
    )


def _options(call: openai.Shared, **own: Any) -> Options:
    shared = (set(Options.__struct_fields__) & set(openai.Shared.__struct_fields__)) - {"max_tokens", "seed"}
    # OpenAI's seeds may be negative; nodes take 63 bits.
    seed = None if call.seed is None else call.seed & ((1 << 63) - 1)
    return Options(**{field: getattr(call, field) for field in shared}, seed=seed, **own)


def _split(services: Services, model: str) -> tuple[str, str | None]:
    if model == services.base.id:
        return model, None
    name, colon, qualifier = model.partition(":")
    return name, (qualifier or ":") if colon else None


def _base(services: Services) -> openai.Model:
    return openai.Model(services.base.id, 0, "garnish")


routes = [
    ExactRoute("/v1/models", list_models, methods=["GET"]),
    ExactRoute("/v1/models/{id:path}", get_model, methods=["GET"]),
    ExactRoute("/v1/completions", completions, methods=["POST"]),
    ExactRoute("/v1/chat/completions", chat_completions, methods=["POST"]),
]
