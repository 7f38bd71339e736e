"""The messages of /v1, as OpenAI's clients send them, and which of their fields are served."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cluster.errors import ServiceError
from gateway import schema

MAX_CHOICES = 8
"""Generations of one call: prompts times `n`."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""Fields whose effect is not served, with the values that ask for no effect."""

HARMLESS = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that are accepted and change nothing."""

Count = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Stops = Annotated[list[schema.StopText], Meta(max_length=4)] | schema.StopText
AnySeed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; nothing is obfuscated."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: schema.Text
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn. The fields that must be null are those of an earlier reply that a client sends back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: schema.Text | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of completion have. `top_k`, `min_p`, `ignore_eos` and `timeout` are Garnish's own."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    """`name`, `name:alias`, `name:version`, or the base model's id."""
    max_tokens: schema.TokenCount | None = None
    temperature: schema.Temperature | None = None
    top_p: schema.Share | None = None
    n: Count | None = None
    stop: Stops | None = None
    seed: AnySeed | None = None
    presence_penalty: schema.Penalty | None = None
    frequency_penalty: schema.Penalty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: schema.TopK | None = None
    min_p: schema.MinP | None = None
    ignore_eos: bool | None = None
    timeout: schema.Timeout | None = None


class CompletionRequest(Shared, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: schema.Text | Annotated[list[schema.Text], Meta(min_length=1, max_length=MAX_CHOICES)]
    logprobs: schema.LogprobCount | None = None


class ChatRequest(Shared, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: schema.TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: schema.LogprobCount | None = None


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


class Details(msgspec.Struct, frozen=True):
    cached_tokens: int


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details


FinishReason = Literal["stop", "length"]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct, frozen=True):
    """Also each chunk of a stream, where only the last one has `usage`, if it was asked for."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None
    object: Literal["text_completion"] = "text_completion"


class ChatTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatTop]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class Reply(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: Reply
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class Chat(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: TokenUsage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class OpenAIErrorContent(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class OpenAIError(msgspec.Struct, frozen=True):
    error: OpenAIErrorContent


def served_fields(body: Any) -> Any:
    """The body without fields that ask for nothing. Raises ServiceError for one that asks for what is not served."""
    if not isinstance(body, dict):
        return body
    for field, neutral in NEUTRAL.items():
        # 1 == True in Python, but not in JSON.
        if field in body and not any(body[field] == value and type(body[field]) is type(value) for value in neutral):
            raise ServiceError("validation_failed", f"{field} is not served", param=field)
    return {field: value for field, value in body.items() if field not in NEUTRAL and field not in HARMLESS}
