"""POST /tokenize and /detokenize: text to token ids and back, exactly as calls see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.text import BaseText, TextError
from gateway.api.token_schema import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from gateway.calls.invocation import served_context
from gateway.calls.model_names import check_model
from gateway.calls.prompts import INLINE_CHARACTERS, MESSAGE_CHARACTERS, in_text_thread
from gateway.http.bodies import decode_json, read_call_body
from gateway.http.params import known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.services import Services, services_of

T = TypeVar("T")

Tokenized = tuple[list[int], list[str] | None]
"""Ids, and the tokens as the vocabulary writes them."""


async def tokenize(request: Request) -> Response:
    services, call = await _read(request, TokenizeRequest)
    if (call.prompt is None) == (call.messages is None):
        raise ServiceError("validation_failed", "send exactly one of prompt and messages", param="prompt")
    if call.messages is None and call.add_generation_prompt is not None:
        message = "add_generation_prompt is for messages; a prompt is taken as it is"
        raise ServiceError("validation_failed", message, param="add_generation_prompt")

    def work() -> Tokenized:
        tokens = _encode(services.text, call)
        return tokens, services.text.token_strings(tokens) if call.return_token_strs else None

    field = "prompt" if call.messages is None else "messages"
    tokens, strings = await _run(services, request, work, _characters(call), field)
    context = await served_context(services)
    return json_response(TokenizeReply(len(tokens), context, tokens, strings))


async def detokenize(request: Request) -> Response:
    services, call = await _read(request, DetokenizeRequest)
    text = await _run(services, request, lambda: services.text.decode(call.tokens), len(call.tokens), "tokens")
    return json_response(DetokenizeReply(text))


Call = TypeVar("Call", TokenizeRequest, DetokenizeRequest)


async def _read(request: Request, kind: type[Call]) -> tuple[Services, Call]:
    """The checked body of a caller who may name its model."""
    services = services_of(request)
    tenant = await services.callers.tenant(request)
    known_only(request)
    call = decode_json(await read_call_body(request, services.config), kind)
    if call.model is not None:
        await check_model(services, tenant, call.model)
    return services, call


def _encode(text: BaseText, call: TokenizeRequest) -> list[int]:
    """Raises TextError."""
    if call.messages is not None:
        return text.encode_chat(
            [message.plain() for message in call.messages],
            answer=call.add_generation_prompt is not False,
            special=bool(call.add_special_tokens),
        )
    assert call.prompt is not None
    return text.encode_plain(call.prompt) if call.add_special_tokens is False else text.encode_prompt(call.prompt)


def _characters(call: TokenizeRequest) -> int:
    if call.messages is None:
        return len(call.prompt or "")
    return sum(len(message.plain()["content"]) + MESSAGE_CHARACTERS for message in call.messages)


async def _run(services: Services, request: Request, work: Callable[[], T], size: int, field: str) -> T:
    """What `work` returns, inline where it is short. Raises ServiceError naming `field`; ClientGone."""
    deadline = time.monotonic() + services.config.request_timeout
    try:
        if size <= INLINE_CHARACTERS:
            return work()
        return await in_text_thread(services.text_threads, work, deadline, request.receive)
    except TextError as error:
        raise ServiceError("validation_failed", str(error), param=field) from error


routes = [
    ExactRoute("/tokenize", tokenize, methods=["POST"]),
    ExactRoute("/detokenize", detokenize, methods=["POST"]),
]
