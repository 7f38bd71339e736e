"""Messages of /v1, compatible with OpenAI's clients, limited to the supported fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api import schema
from gateway.api.moved_schema import moved

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


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Call of a tool: its name, and its arguments as JSON text."""

    name: str
    arguments: schema.Text = "{}"


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tool call of an assistant's message that a client sends back."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """Returns the call as chat templates read it: arguments as an object where they are one."""
        try:
            arguments: Any = msgspec.json.decode(self.function.arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            arguments = self.function.arguments
        return {
            "id": self.id,
            "type": self.type,
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Message of a conversation. Clients may send back a message of an earlier reply. Its fields that are not supported
    here must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: schema.Text | list[TextPart] | None = None
    """Text; null or absent only together with `tool_calls`."""
    name: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    """Reasoning of an earlier answer, which the chat template gets."""
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    """Calls that the assistant made in this message."""
    tool_call_id: str | None = None
    """Id of the call whose result a message of the role `tool` is."""

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates read it: content as one text, the role `developer` as `system`."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        fields = ("name", "tool_call_id") if self.role == "tool" else ("name",)
        return message | {name: value for name in fields if (value := getattr(self, name)) is not None}


class ToolFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tool that the model may call. `parameters`: JSON Schema of its arguments."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True: each call keeps the schema, also under the `tool_choice` `auto`."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: ToolFunction
    type: Literal["function"] = "function"

    def plain(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it: what it has of name, description and parameters, in this order.
        Models were trained on this text."""
        function = self.function
        parts = {"name": function.name, "description": function.description, "parameters": function.parameters}
        return {"type": self.type, "function": {name: part for name, part in parts.items() if part is not None}}


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tool that the answer must call."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class Shared(schema.GenerationParams, frozen=True, kw_only=True):
    """Parameters of both kinds of completion, OpenAI's own and vLLM's."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    """Model: `name`, `name:alias`, `name:version`, or the base model's id."""
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
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """Tools that the answer may or must call; null means `auto`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values for variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: str | None = None
    """Value for the chat template's variable of this name; `none` and null leave it out."""
    add_generation_prompt: bool | None = None
    """True, the default, opens the assistant's turn at the end of the prompt; false leaves the prompt as it is."""
    continue_final_message: bool | None = None
    """True ends the prompt inside of the last message, whose content the answer continues. `add_generation_prompt`
    can't be true then."""
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer, if the function's policy separates it."""

    @property
    def top_logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[ToolFunction]:
        """Returns the tools that the answer may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def forced_tools(self) -> list[ToolFunction]:
        """Returns the tools of which the answer must call one; empty if it may be text."""
        tools = [tool.function for tool in self.tools or []]
        if isinstance(self.tool_choice, ChosenTool):
            return [tool for tool in tools if tool.name == self.tool_choice.function.name]
        return tools if self.tool_choice == "required" else []

    @property
    def forced_form(self) -> dict[str, Any] | None:
        return call_form(self.forced_tools) if self.forced_tools else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


def call_form(tools: list[ToolFunction], arguments: str = "arguments", *, strict_only: bool = False) -> dict[str, Any]:
    """Returns the JSON Schema of a call of any of the tools. `arguments`: name of the field with the arguments.
    `strict_only`: the arguments of tools that are not strict may be any object."""
    calls = []
    for place, tool in enumerate(tools):
        free = tool.parameters is None or (strict_only and not tool.strict)
        stated = {} if free else moved(tool.parameters, f"#/anyOf/{place}/properties/{arguments}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, arguments: {"type": "object", **stated}},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


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


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class TokenUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET
    """Only in answers of functions with a `reasoning_parser`."""


FinishReason = Literal["stop", "length", "tool_calls"]


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
    token_ids: list[int] | None = None
    """Ids of the generated tokens, if `return_token_ids` asks for them, like `prompt_token_ids`."""
    prompt_token_ids: list[int] | None = None
    """Ids of the prompt's tokens. A stream has them in the choice's first chunk."""


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


class CallMade(msgspec.Struct, frozen=True):
    """Tool call in an answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Reply(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[CallMade] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    message: Reply
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Chat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a tool call in a stream. `id`, `type` and the name come first, then the arguments in parts."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: TokenUsage | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Only in each choice's first chunk, if `return_token_ids` asks for it."""
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class OpenAIErrorContent(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str
    request_id: str


class OpenAIError(msgspec.Struct, frozen=True):
    error: OpenAIErrorContent
