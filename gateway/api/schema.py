"""Messages of the native routes. They validate requests, and openapi.json is generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from adapters.destinations import Destination
from adapters.functions import Defaults

MAX_CHOICES = 16
"""Maximum choices (`n`) per prompt."""
MAX_GENERATIONS = 64
"""Maximum generations of one call: choices times prompts."""
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
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Count = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]


class GenerationParams(Defaults, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=False):
    """Parameters of generation on all routes, with those that functions may preset (Defaults). What is null or absent
    has the function's default, else the service's."""

    max_tokens: TokenCount | None = None
    top_k: TopK | None = None
    """Number of most likely tokens to sample from; 0 and -1: all."""
    timeout: Timeout | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Divisor of the logits of tokens that occur in the prompt or the output; 1: no penalty."""
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    """Value added to the logit of each token id."""
    min_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=128)] | None = None
    n: Count | None = None
    """Number of choices per prompt."""
    prompt_logprobs: LogprobCount | None = None
    skip_special_tokens: bool | None = None
    """True, or null, if special tokens are omitted from the text."""
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=10_000_000)] | None = None
    """Number of the prompt's last tokens to keep; -1: as many as leave room for `max_tokens`."""

    # Properties whose fields differ between routes:

    @property
    def alternatives(self) -> int | None:
        """Returns how many most likely tokens to report per token; None: no log probabilities."""
        stated: int | None = getattr(self, "logprobs", None)
        return stated

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
    """Exactly one of `prompt` (text or token ids) and `messages`."""

    prompt: Text | Annotated[list[TokenId], Meta(min_length=1)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    """True if the text begins with the prompt."""
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    """Ignored: every stream ends with its usage."""
    metadata: dict[str, Any] | None = None
    """Ignored; for the caller's own logs."""
    background: bool = False
    """True for an asynchronous call: the reply is 202 once the call is stored, and the call runs later."""
    on_success: Destination | None = None
    """Destination of a successful asynchronous call's result; null: that of the function's policy."""
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
    """Log probability of a prompt's token, given those before it. `rank` 1 is the likeliest of the vocabulary."""

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
    """Log probability of each prompt token, null for the first one; only if requested."""
    stop_reason: int | str | None = None
    """Stop string, or the one of `stop_token_ids`, that ended the text."""


class FinishedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The output in a stream's `done`: its text went before."""

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
    """Strategy. wait: computed after the complete load; pipeline: layer by layer during the load; assist: started by
    CPU workers."""
    load_ms: float
    """Milliseconds from the request for the first byte until the adapter was on the device; 0: not loaded before the
    request ended."""
    exposed_ms: float
    """Milliseconds for which the computation waited for the adapter's bytes and for nothing else."""
    fetch_ms: float = 0.0
    """Part of `load_ms` until the adapter was in the node's host memory, in milliseconds."""
    layers_cpu: int = 0
    """Number of prompt layers whose adapter part CPU workers computed."""
    layers_device: int = 0
    """Number of prompt layers computed on the device before the complete adapter was loaded."""
    replays: int = 0
    """Number of prompt chunks computed again because a CPU worker failed."""
    forecast_ms: float = 0.0
    """Planned value of `exposed_ms`, in milliseconds."""


class Timing(msgspec.Struct, frozen=True):
    """Milliseconds. `ttft_ms` and `tpot_ms` are null where there were too few tokens to measure. `resumed`: how often
    the call went on on another node, because one failed after its first token; then `queue_ms`, `cold_start` and
    `device_ms` are of the node where it ended. `device_ms`: its part of the passes that computed it, of all choices.
    `total_ms`: until the last choice had ended."""

    queue_ms: float
    cold_start: ColdStartTiming
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float
    resumed: int = 0
    device_ms: float = 0.0


class InvokeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`version` and `digest` are null for the base model. With `n` > 1 `outputs` has all choices, and `output` is the
    first of them; `timing` is the first one's, too."""

    id: str
    function: str
    version: int | None
    digest: str | None
    output: Output
    usage: Usage
    timing: Timing
    outputs: list[Output] | None = None


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token, or a text without one: then `token_id` is null.

    Such a text was held back until the end (it may have been part of a stop string), or is the prompt's, where that was
    asked for: it comes first, with its log probabilities."""

    text: str
    index: int
    token_id: int | None
    logprob: Logprob | None = None
    choice: int | None = None
    """Index of the choice; only with `n` > 1."""
    prompt_logprobs: list[PromptLogprob | None] | None = None


class DoneEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stream's last event: the reply without texts. `node` and `cold_start` repeat the headers, which may have gone
    out too early for them."""

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
