"""The messages of /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.api import openai_schema as openai
from gateway.api import schema

MAX_TOKENS = 1 << 19
"""Ids of one list; a body of 1 MiB holds no more."""

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `prompt` and `messages`. All functions of a base have its tokenizer; without `model` the base is
    meant."""

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
