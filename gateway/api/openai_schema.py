"""Messages of /v1, compatible with OpenAI's clients, limited to the supported fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters.functions import StopText
from gateway.api import schema

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
"""Fields that are accepted and have no effect."""

Stops = Annotated[list[StopText], Meta(max_length=4)] | StopText
AnySeed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


Part = schema.Text | schema.TokenId | Annotated[list[schema.TokenId], Meta(min_length=1)]
"""Element of the list `prompt`: a text, a token id, or a list of token ids. Single token ids together form one
prompt."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted without an effect."""
    continuous_usage_stats: bool | None = None
    """Extension of vLLM. If it is true, and `include_usage` too, each chunk contains the usage up to this chunk."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: schema.Text
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Message of a conversation. Clients may send back a message of an earlier reply. Its fields that are not supported
    here must be null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: schema.Text | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates read it: content as one text, the role `developer` as `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Shared(schema.GenerationParams, frozen=True, kw_only=True):
    """Parameters of both kinds of completion, OpenAI's own and vLLM's."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    """Model: `name`, `name:alias`, `name:version`, or the base model's id."""
    stop: Stops | None = None
    seed: AnySeed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(Shared, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: schema.Text | Annotated[list[Part], Meta(min_length=1)]
    logprobs: schema.LogprobCount | None = None
    echo: bool | None = None
    """True if the text begins with the prompt's text. With `logprobs`, the tokens begin with the prompt's tokens."""


class ChatRequest(Shared, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: schema.TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: schema.LogprobCount | None = None

    @property
    def top_logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class Model(msgspec.Struct, frozen=True):
    """A model in the list of models. The fields `root`, `parent` and `max_model_len` are not OpenAI's but vLLM's."""

    id: str
    created: int
    owned_by: str
    root: str
    """Name of the function, which is `id` without the alias or version."""
    parent: str | None
    max_model_len: int
    """Maximum tokens of prompt and output together on the nodes that serve now."""
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
    """Log probabilities of a completion's tokens. The first token of an echoed prompt has none, so its entries are
    null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedLogprob(msgspec.Struct, frozen=True):
    """Log probability of one token, in vLLM's format. `rank` counts from 1, the most likely token of the vocabulary."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, RankedLogprob] | None]
"""Log probabilities for each prompt token, by token id: of the token itself and of the most likely ones. Null for the
first token."""


class CompletionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Choice of a completion. `stop_reason` is the stop string, or the id of `stop_token_ids`, that ended the text."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(msgspec.Struct, frozen=True):
    """A completion, or one chunk of a streamed completion. If usage is requested, a stream's last chunk contains it."""

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


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    message: Reply
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None = None


class Chat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None = None


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
