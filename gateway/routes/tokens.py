"""POST /tokenize and /detokenize: text to token ids and back, exactly as calls see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import ServiceError
from cluster.text import BaseText, TextError
from gateway.api import openai_schema as openai
from gateway.api import schema
from gateway.calls.model_names import policy_of
from gateway.calls.prepare import served_context
from gateway.calls.prompts import INLINE_CHARACTERS, MESSAGE_CHARACTERS, in_text_thread
from gateway.calls.template_process import Job
from gateway.http.bodies import read_message
from gateway.http.responses import json_response
from gateway.http.routing import Routes
from gateway.services import Services

routes = Routes()

MAX_TOKENS = 1 << 19
"""Ids of one list; a body of 1 MiB holds no more."""

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` and `messages`. All functions of a base have its tokenizer, and some a chat template of
    their own; without `model` the base is meant."""

    model: ModelName | None = None
    prompt: schema.Text | None = None
    messages: Annotated[list[openai.ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    """The tokenizer's, around the text. Default, as in calls: true for a prompt, false for messages, whose template
    writes its own."""
    add_generation_prompt: bool | None = None
    """Of messages: whether the assistant's turn is opened. Default: true."""
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    """Tokens that prompt and output may have together on the nodes that serve now."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: ModelName | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=MAX_TOKENS)]


class DetokenizeReply(msgspec.Struct, frozen=True):
    prompt: str


T = TypeVar("T")

Tokenized = tuple[list[int], list[str] | None]
"""Ids, and the tokens as the vocabulary writes them."""


@routes.tenant(
    "POST /tokenize",
    "The token ids of a prompt or a conversation, as a call would have them",
    {200: TokenizeReply},
    body=TokenizeRequest,
    errors=(499, 504),
)
async def tokenize(request: Request, services: Services, tenant: str) -> Response:
    call, template = await _read(request, services, tenant, TokenizeRequest)
    if (call.prompt is None) == (call.messages is None):
        raise ServiceError("validation_failed", "send exactly one of prompt and messages", param="prompt")
    if call.messages is None and call.add_generation_prompt is not None:
        message = "add_generation_prompt is for messages; a prompt is taken as it is"
        raise ServiceError("validation_failed", message, param="add_generation_prompt")

    rendered = None
    if call.messages is not None and template is not None:
        job = Job(
            template,
            [message.plain() for message in call.messages],
            dict(services.text.special),
            call.add_generation_prompt is not False,
        )
        deadline = time.monotonic() + services.config.request_timeout
        rendered = await services.templates.render(tenant, job, deadline=deadline, receive=request.receive)

    def work() -> Tokenized:
        tokens = _encode(services.text, call, rendered)
        return tokens, services.text.token_strings(tokens) if call.return_token_strs else None

    field = "prompt" if call.messages is None else "messages"
    size = _characters(call) if rendered is None else len(rendered)
    tokens, strings = await _run(services, request, work, size, field)
    context = await served_context(services)
    return json_response(TokenizeReply(len(tokens), context, tokens, strings))


@routes.tenant(
    "POST /detokenize",
    "The text of token ids, special tokens included",
    {200: DetokenizeReply},
    body=DetokenizeRequest,
    errors=(499, 504),
)
async def detokenize(request: Request, services: Services, tenant: str) -> Response:
    call, _ = await _read(request, services, tenant, DetokenizeRequest)
    text = await _run(services, request, lambda: services.text.decode(call.tokens), len(call.tokens), "tokens")
    return json_response(DetokenizeReply(text))


Call = TypeVar("Call", TokenizeRequest, DetokenizeRequest)


async def _read(request: Request, services: Services, tenant: str, kind: type[Call]) -> tuple[Call, str | None]:
    """The checked body of a caller who may name its model, and that model's own chat template."""
    call = await read_message(request, services.config, kind)
    if call.model is None:
        return call, None
    return call, (await policy_of(services, tenant, call.model)).defaults.chat_template


def _encode(text: BaseText, call: TokenizeRequest, rendered: str | None) -> list[int]:
    """`rendered`: the messages, where the function's own template has made a text of them. Raises TextError."""
    if rendered is not None:
        return text.encode_rendered(rendered, special=bool(call.add_special_tokens))
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
    """Returns what `work` returns; runs it inline where `size` is small, else in a thread. Raises ServiceError, which
    names `field` when the text is at fault; ClientGone."""
    deadline = time.monotonic() + services.config.request_timeout
    try:
        if size <= INLINE_CHARACTERS:
            return work()
        return await in_text_thread(services.text_threads, work, deadline, request.receive)
    except TextError as error:
        raise ServiceError("validation_failed", str(error), param=field) from error
