"""POST /tokenize and /detokenize: convert text to token ids and back, exactly as calls do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from cluster.text import BaseText
from gateway.api import openai_schema as openai
from gateway.api import schema
from gateway.calls.prompts import Conversation, Prompts, RenderedConversation, Source, run_on_text
from gateway.calls.tools import end_of_prompt
from gateway.groups import Calls
from gateway.http.bodies import read_message
from gateway.http.errors import invalid
from gateway.http.rates import TEXT
from gateway.http.responses import json_response
from gateway.http.routing import Routes

routes = Routes(Calls)

MAX_TOKENS = 1 << 19
"""Maximum token ids of one list; a body of 1 MiB holds no more."""

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Text to tokenize: exactly one of `prompt` and `messages`. All functions use the base model's tokenizer, but some
    have their own chat template. Without `model` the base model's template is used."""

    model: ModelName | None = None
    prompt: schema.Text | None = None
    messages: Annotated[list[openai.ChatMessage], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    """True if the tokenizer adds its special tokens around the text. Default, as in calls: true for a prompt, false for
    messages, whose template writes its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Has the meaning that it has in a chat."""
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: ModelName | None = None
    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=MAX_TOKENS)]


class DetokenizeReply(msgspec.Struct, frozen=True):
    prompt: str


T = TypeVar("T")

Tokenized = tuple[list[int], list[str] | None]
"""Token ids, and the tokens as the vocabulary writes them; the latter are None if they were not requested."""


@routes.tenant(
    "POST /tokenize",
    "The token ids of a prompt or a conversation, as a call would have them",
    {200: TokenizeReply},
    body=TokenizeRequest,
    errors=(499, 504),
    rate=TEXT,
)
async def tokenize(request: Request, calls: Calls, tenant: str) -> Response:
    call, template = await _read(request, calls, tenant, TokenizeRequest)
    if (call.prompt is None) == (call.messages is None):
        raise invalid("prompt", "send exactly one of prompt and messages")
    for field in ("add_generation_prompt", "continue_final_message"):
        if call.messages is None and getattr(call, field) is not None:
            raise invalid(field, f"{field} is for messages; a prompt is taken as it is")

    source, deadline = _source(call), time.monotonic() + calls.config.request_timeout
    source = await calls.inputs.render(request, tenant, template, source, deadline)

    def work() -> Tokenized:
        tokens = _encode(calls.inputs.text, call, source)
        return tokens, calls.inputs.text.token_strings(tokens) if call.return_token_strs else None

    tokens, strings = await _run(calls, request, work, source.characters, source.field)
    context = await calls.inputs.served_context()
    return json_response(TokenizeReply(len(tokens), context, tokens, strings))


@routes.tenant(
    "POST /detokenize",
    "The text of token ids, special tokens included",
    {200: DetokenizeReply},
    body=DetokenizeRequest,
    errors=(499, 504),
    rate=TEXT,
)
async def detokenize(request: Request, calls: Calls, tenant: str) -> Response:
    call, _ = await _read(request, calls, tenant, DetokenizeRequest)
    text = await _run(calls, request, lambda: calls.inputs.text.decode(call.tokens), len(call.tokens), "tokens")
    return json_response(DetokenizeReply(text))


Call = TypeVar("Call", TokenizeRequest, DetokenizeRequest)


async def _read(request: Request, calls: Calls, tenant: str, kind: type[Call]) -> tuple[Call, str | None]:
    """Returns the validated body, and the model's own chat template or None. Raises NotFound for an unknown model."""
    call = await read_message(request, calls.config, kind)
    if call.model is None:
        return call, None
    return call, (await calls.inputs.policy_of(tenant, call.model)).defaults.chat_template


def _source(call: TokenizeRequest) -> Source:
    if call.messages is not None:
        answer, continues = end_of_prompt(call.messages, call.add_generation_prompt, call.continue_final_message)
        messages = [message.plain() for message in call.messages]
        return Conversation(messages, answer=answer, continues=continues)
    return Prompts([call.prompt or ""])


def _encode(text: BaseText, call: TokenizeRequest, source: Source) -> list[int]:
    """Returns the token ids of a prompt or a conversation. Raises TextError."""
    special = call.add_special_tokens
    match source:
        case RenderedConversation():
            return text.encode_rendered(source.text, special=bool(special))
        case Conversation():
            return source.token_ids(text, special=bool(special))
    assert call.prompt is not None
    return text.encode_plain(call.prompt) if special is False else text.encode_prompt(call.prompt)


async def _run(calls: Calls, request: Request, work: Callable[[], T], size: int, field: str) -> T:
    deadline, threads = time.monotonic() + calls.config.request_timeout, calls.inputs.text_threads
    return await run_on_text(work, size=size, field=field, threads=threads, deadline=deadline, receive=request.receive)
