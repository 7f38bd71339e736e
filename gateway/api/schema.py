"""Messages of the native routes. They validate requests, and openapi.json is generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters.destinations import Destination
from adapters.functions import CallDefaults
from adapters.functions import TokenId as TokenId

MAX_CHOICES = 16
MAX_GENERATIONS = 64
"""Maximum generations of one call: choices times prompts."""
MAX_ALLOWED = 4096
"""Maximum number of `allowed_token_ids`."""
MAX_BAD_CHARACTERS = 4096
"""Maximum characters of all bad words together, because tokenizing them blocks other requests."""
MAX_TIMEOUT = 3600

Text = Annotated[str, Meta(max_length=1 << 20)]
TopK = Annotated[int, Meta(ge=-1, le=1_000_000)]
LogprobCount = Annotated[int, Meta(ge=0, le=20)]
TokenCount = Annotated[int, Meta(ge=1, le=10_000_000)]
FinishReason = Literal["stop", "length", "timeout", "cancelled"]
Tier = Literal["none", "host", "disk", "absent"]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT)]
Count = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
RequestId = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,128}$")]


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """The answer is any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """The answer is a JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """A JSON Schema with a name."""

    schema_: dict[str, Any] | bool
    name: Annotated[str, Meta(max_length=512)] = ""
    """Accepted without an effect, like `description`."""
    description: str | None = None
    strict: bool | None = None
    """Accepted without an effect: the answer always has the form."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """The answer is a JSON text of this schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the answer as in vLLM. Exactly one of the first five fields must be stated."""

    json: dict[str, Any] | bool | str | None = None
    """JSON Schema, or its text."""
    regex: Annotated[str, Meta(max_length=1 << 16)] | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1000)] | None = None
    grammar: Annotated[str, Meta(max_length=1 << 16)] | None = None
    """Grammar in llguidance's variant of Lark."""
    json_object: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    disable_fallback: bool | None = None
    """Accepted without an effect. The fields before it are served at their defaults only."""


class GenerationParams(CallDefaults, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=False):
    """Parameters of generation that all routes accept. A parameter that is null or absent takes the function's default
    (`CallDefaults`). If the function has none, it takes the service's default."""

    max_tokens: TokenCount | None = None
    top_k: TopK | None = None
    """Number of most likely tokens to sample from; 0 and -1 mean all tokens."""
    timeout: Timeout | None = None
    n: Count | None = None
    prompt_logprobs: LogprobCount | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    """Tokens that the output may have; null allows all. A text ends only by a token that is among them."""
    add_special_tokens: bool | None = None
    """True if the tokenizer adds its special tokens around the text. Default: true for a prompt, false for messages,
    whose template writes its own."""
    spaces_between_special_tokens: bool | None = None
    """False writes consecutive added tokens without the spaces that the tokenizer puts between them. It has an effect
    only if `skip_special_tokens` is false."""
    return_token_ids: bool | None = None
    """True if the reply has the ids of the prompt's tokens and of the generated ones."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Secret that separates cached prefixes: only calls with the same one share them."""
    request_id: RequestId | None = None
    """Request id of the reply, as in the header x-request-id, which has priority."""
    response_format: ResponseFormat | None = None
    """Form of the answer as in OpenAI's API: any text, a JSON object, or a JSON text of a schema."""
    structured_outputs: StructuredOutputs | None = None

    # Properties whose fields differ between routes:

    @property
    def top_logprob_count(self) -> int | None:
        """Returns the number of most likely tokens to report for each token; None if no log probabilities are
        requested."""
        stated: int | None = getattr(self, "logprobs", None)
        return stated

    @property
    def forced_form(self) -> dict[str, Any] | None:
        """Returns the JSON Schema of a tool call that the answer must be; None if it need be none."""
        return None

    @property
    def echoes(self) -> bool:
        """Returns whether the text begins with the prompt; False on routes without `echo`."""
        return bool(getattr(self, "echo", None))

    @property
    def limit(self) -> int | None:
        """Returns the maximum number of output tokens."""
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        """Returns the name of the request's field that limits the output tokens."""
        return "max_tokens"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Text


class InvokeRequest(GenerationParams, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of a native call. It must have exactly one of `prompt` (a text, or a list of token ids) and `messages`."""

    prompt: Text | Annotated[list[TokenId], Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    """Accepted without an effect, because every stream ends with its usage."""
    metadata: dict[str, Any] | None = None
    """Accepted without an effect. The caller may use it for its own logs."""
    background: bool = False
    """True for an asynchronous call: the reply is 202 once the call is stored, and the call runs later."""
    on_success: Destination | None = None
    """Destination of the result of an asynchronous call that succeeds; null means the destination in the function's
    policy."""
    on_failure: Destination | None = None


class Top(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    logprob: float


class Logprob(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    logprob: float
    top: list[Top]


class PromptLogprob(msgspec.Struct, frozen=True):
    """Log probability of one prompt token, given the tokens before it. `rank` counts from 1, the most likely token of
    the vocabulary."""

    token: str
    token_id: int
    logprob: float
    rank: int
    top: list[Top]


class Output(msgspec.Struct, frozen=True, omit_defaults=True):
    text: str
    finish_reason: FinishReason
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """Log probability of each prompt token; null for the first token. The field is absent unless it was requested."""
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    """Ids of the generated tokens, including one that ended the text. The field is absent unless it was requested, like
    `prompt_token_ids`."""
    prompt_token_ids: list[int] | None = None


class FinishedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A choice in a stream's `done` event. It has no text, because the `token` events have already sent it."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ColdStartTiming(msgspec.Struct, frozen=True):
    state: Tier
    """Tier of the adapter when the request arrived; `none`: nothing had to be loaded."""
    plan: str
    """Strategy of the cold start. `wait`: the prompt is computed after the complete load. `pipeline`: it is computed
    layer by layer during the load. `assist`: CPU workers compute the adapter's part of the first layers."""
    load_ms: float
    """Milliseconds from the request for the adapter's first byte until the adapter was on the device. The value is 0 if
    the load had not ended when the request did."""
    exposed_ms: float
    """Milliseconds for which computation waited only for the adapter's bytes."""
    fetch_ms: float = 0.0
    """Milliseconds of `load_ms` that passed until the adapter was in the node's host memory."""
    layers_cpu: int = 0
    """Number of prompt layers whose adapter part CPU workers computed, summed over the prompt's chunks."""
    layers_device: int = 0
    """Number of prompt layers whose adapter part the device computed, summed over the chunks that began before the load
    had ended."""
    replays: int = 0
    """Number of prompt chunks computed again because a CPU worker failed."""
    forecast_ms: float = 0.0


class Timing(msgspec.Struct, frozen=True):
    """Timing of a call, in milliseconds. `queue_ms`, `cold_start`, `ttft_ms` and `tpot_ms` are those of the first
    choice. `ttft_ms` is null without a token, and `tpot_ms` with fewer than two. `total_ms` is the time from receipt
    until the last choice ended. `device_ms` is the device time of all choices: their shares of the forward passes that
    computed them. `resumed` is the number of times that a choice continued on another node, because its node failed
    after the first token. In that case `queue_ms`, `cold_start` and `device_ms` cover the last node only."""

    queue_ms: float
    cold_start: ColdStartTiming
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float
    resumed: int = 0
    device_ms: float = 0.0


class InvokeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Reply to a native call. `version` and `digest` are null for the base model. `output` is the first choice. If `n`
    is greater than 1, `outputs` lists all choices, including the first one."""

    id: str
    function: str
    version: int | None
    digest: str | None
    output: Output
    usage: Usage
    timing: Timing
    outputs: list[Output] | None = None


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `token` event of a stream: one token, or a text without a token, whose `token_id` is null.

    There are two kinds of events without a token. If the prompt's text, its log probabilities or its token ids are
    requested, the first event contains them. The last event may contain text that was held back because it could have
    been the beginning of a stop string.
    """

    text: str
    index: int
    token_id: int | None
    logprob: Logprob | None = None
    choice: int | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    prompt_token_ids: list[int] | None = None


class DoneEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """The `done` event, which ends a stream: the reply without its texts. `node` and `cold_start` repeat the headers
    `x-garnish-node` and `x-garnish-cold-start`. They are needed here, because the headers may have been sent before
    these values were known."""

    id: str
    function: str
    version: int | None
    digest: str | None
    output: FinishedOutput
    usage: Usage
    timing: Timing
    node: str | None
    cold_start: str | None
    server_timing: str
    outputs: list[FinishedOutput] | None = None


class ErrorContent(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    param: str | None
    request_id: str
    details: list[dict[str, Any]] = []
    """List of problems: `{tensor, problem, expected, found}` for an adapter, `{check, problem}` for readiness."""


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorContent
