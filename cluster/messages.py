"""Messages between gateway and nodes, as msgpack.

Every message has PROTOCOL_VERSION in its `v`; messages of other versions are refused.

Gateway -> node (HTTP, each with `authorization: Bearer <cluster secret>`):

    POST /generate   body GenerateRequest; the reply is a stream of frames, each 4 bytes of big-endian length and one
                     Event. The last frame is Done or Failed. Closing the connection cancels the request.
    GET  /record     the reply is a NodeReport with everything about the node
    POST /drain, /undrain          204; while draining, running requests end and new ones are refused
    GET  /adapters, POST /adapters/prefetch, /adapters/evict: cluster.residency
    GET  /healthz    needs no secret; 200 when the process is alive

Node -> gateway:

    POST /cluster/base     body BaseManifest as JSON (adapters.base_manifest), from a node whose base model has no
                           manifest in the registry; the reply is 204 once it is stored
    POST /cluster/record   body NodeReport (cluster.news), every RECORD_INTERVAL seconds; the reply is 204, or 200 with
                           FullReportRequest
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.frames import frame

PROTOCOL_VERSION = 3
BASE_PATH = "/cluster/base"
"""Path at which a gateway takes the manifest of a base model (adapters.base_manifest), as JSON, from a node."""

SloClass = Literal["strict", "standard", "best_effort"]


class Grammar(msgspec.Struct, frozen=True):
    """Form that the output must have (structured output)."""

    kind: Literal["json", "regex", "choice", "lark"]
    text: str
    """JSON Schema, regular expression, JSON list of the possible texts, or grammar in llguidance's variant of Lark, by
    kind."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters and stop conditions of a call. This is the only struct that carries a call's parameters from
    the gateway to the engine.

    `temperature` 0 is greedy decoding. `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    """Index of this choice among the `n` choices of a /v1 request."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    """Number of most likely tokens whose log probabilities are returned with the chosen token's; None: no log
    probabilities."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that are in the prompt or the output: it divides their positive logits and multiplies their
    negative ones."""
    logit_bias: dict[int, float] = {}
    """Bias added to each token's logit, by token id."""
    min_tokens: int = 0
    """Minimum number of generated tokens. Until then end tokens and `stop_token_ids` are masked, and stop strings are
    ignored."""
    stop_token_ids: list[int] = []
    bad_words: list[list[int]] = []
    """Token sequences that the output must not contain."""
    prompt_logprobs: int | None = None
    """Same as `logprobs`, for all prompt tokens except the first."""
    skip_special_tokens: bool = True
    include_stop: bool = False
    """True: the output text includes the stop string, or the token, that ended it."""
    grammar: Grammar | None = None
    """Form that the output must have; None: any text."""
    allowed_token_ids: list[int] = []
    """Tokens that the output may have; empty: all. They can't be combined with a grammar."""
    spaces_between_special_tokens: bool = True
    """False: consecutive added tokens have no spaces between them in the text."""
    cache_salt: str = ""
    """Text that separates cached prefixes: only requests of a tenant with the same one share them."""


class Adapter(msgspec.Struct, frozen=True):
    """An adapter version as nodes know it. Names of functions and versions stay in the gateway."""

    digest: str
    artifact: str
    """Object key of the serving artifact in the registry."""
    bytes: int
    ranks: tuple[int, ...]
    itemsize: int = 0
    """Bytes per element with which `bytes` was computed. 0: unknown, because an operator named only the digest."""

    config: str = ""
    """SHA-256 of the original adapter_config.json, which names its blob in the registry; `weights` is that of
    adapter_model.safetensors. Empty: unknown; a node whose engine reads the original files can't load the adapter."""
    weights: str = ""

    @property
    def max_rank(self) -> int:
        """Largest rank of its modules; 0 if the ranks are not known."""
        return max(self.ranks, default=0)

    def bytes_in(self, itemsize: int) -> int:
        """Returns the adapter's size in bytes when each element has `itemsize` bytes. Returns `bytes` when either item
        size is unknown (0)."""
        return self.bytes // self.itemsize * itemsize if self.itemsize and itemsize else self.bytes


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request to generate text on a node."""

    id: str
    base: str
    """Fingerprint of the requested base model. A node that serves another base answers `unavailable`."""
    tenant: str
    token_ids: list[int]
    max_tokens: int
    sampling: Sampling
    timeout: float
    """Seconds until the caller's deadline, counted from receipt."""
    adapter: Adapter | None = None
    """Adapter to apply; None: the base model alone."""
    stop: list[str] = []
    ignore_eos: bool = False
    function: str = ""
    """Opaque name of the function inside its tenant, for fair scheduling; empty for the base model alone."""
    weight: float = 1.0
    """The tenant's weight in fair scheduling."""
    slo_class: SloClass = "standard"
    ttft: float | None = None
    """Promised time from receipt to the first token, in seconds (SLO); None: nothing is promised."""
    tpot: float | None = None
    """Promised time between two tokens, in seconds (SLO); None: nothing is promised."""
    generated: list[int] = []
    """Ids of tokens that another node has already generated and sent for this request. They count as output, also for
    `max_tokens`. This node continues after them and sends only further tokens."""
    reserved: int = 0
    """Number of concurrent generations reserved for the request's function. In a full queue the request may displace
    calls of the tenant's other functions. It may do so only while fewer than `reserved` calls of this function wait
    there."""
    place: int = 0
    """Number of the place reserved for the request (cluster.received); 0: the place has no number."""
    v: int = msgspec.field(default_factory=lambda: PROTOCOL_VERSION)  # a plain default would not be sent


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log probability of a token, and of the most likely tokens at its position."""

    token: str
    token_id: int
    logprob: float
    top: list[TopLogprob] = []
    rank: int = 0
    """Rank of a prompt token in the full vocabulary; 1 is the likeliest. 0: not requested."""
    offset: int = 0
    """Number of characters of the generated text before the token; 0 for a token of the prompt."""
    part: bytes = b""
    """UTF-8 bytes of a token with a part of a character, whose text does not show them; empty for other tokens."""


class TopLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Log probability of one of the most likely tokens."""

    token: str
    token_id: int
    logprob: float
    part: bytes = b""
    """Bytes of a part of a character, as in TokenLogprob."""


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="started", omit_defaults=True):
    """Event: the request left the queue."""

    node: str
    cold_start: str
    """Tier of the adapter when the request arrived: none (on the device, or base model alone), host, disk or absent."""
    v: int = PROTOCOL_VERSION


class Token(msgspec.Struct, frozen=True, tag_field="event", tag="token", omit_defaults=True):
    """Newly decoded tokens and their text. `text` may be empty while a character is incomplete or a stop string may be
    starting."""

    text: str
    token_ids: list[int]
    index: int
    """Index of the first of `token_ids` among the generated tokens."""
    logprobs: list[TokenLogprob] = []


class PromptLogprobs(msgspec.Struct, frozen=True, tag_field="event", tag="prompt_logprobs", omit_defaults=True):
    """Log probabilities of the prompt's tokens from `index` on. The prompt's first token has none. All of these events
    precede the first Token."""

    index: int
    logprobs: list[TokenLogprob]


class ColdStart(msgspec.Struct, frozen=True):
    """Times (seconds) that loading the adapter cost this request. `exposed` is the time in which computation waited for
    the adapter's bytes."""

    state: str
    plan: str
    """Loading strategy: none, wait, pipeline or assist."""
    load: float
    """Duration of the load in seconds. 0 means that the load had not ended when the request did; the same holds for
    `fetch`."""
    exposed: float
    fetch: float = 0.0
    """Part of `load`, in seconds, until the adapter was in the node's host memory."""
    layers_cpu: int = 0
    layers_device: int = 0
    """Number of layers whose adapter part was computed on the device; `layers_cpu` is the number on the CPU. Both are
    sums over the prompt chunks that began before the load had ended."""
    replays: int = 0
    """Number of prompt chunks computed again because a CPU worker failed."""
    forecast: float = 0.0
    """Seconds that the node had forecast for `exposed` when it chose the plan."""


class Timing(msgspec.Struct, frozen=True):
    """Durations (seconds) of a request on the node. `queue` is the time in the queue, less the time in which the
    request waited only for its adapter's bytes. `prefill` is the rest of the time to the first token, including that
    wait. `total` is the whole time on the node."""

    queue: float
    prefill: float
    total: float
    cold_start: ColdStart
    preemptions: int = 0
    """Number of times that a strict request preempted this one, so that it was computed again."""
    device: float = 0.0
    """Device time (seconds) of the request: its share, by tokens, of the passes that computed it. 0 may also mean that
    it was not reported."""


class Done(msgspec.Struct, frozen=True, tag_field="event", tag="done", omit_defaults=True):
    """Event: the request ended normally; the last of its events."""

    finish_reason: str
    """Reason for the end: stop, length, timeout or cancelled."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing
    text: str = ""
    """Remaining text, held back until now for an incomplete character or a possible stop string."""
    stop_reason: int | str | None = None
    """Stop string, or id from `stop_token_ids`, that ended the text. None: something else ended it."""


class Failed(msgspec.Struct, frozen=True, tag_field="event", tag="failed", omit_defaults=True):
    """Event: the request ended in an error. `type` is a key of cluster.errors.STATUS."""

    type: str
    message: str
    retryable: bool = False
    """True: no token was computed here, and another node may succeed."""
    retry_after: float | None = None
    damaged: str = ""
    """Digest of the adapter, when its artifact in the registry is damaged or missing; else empty."""


Event = Started | PromptLogprobs | Token | Done | Failed


class VersionMismatch(ValueError):
    """The peer uses a protocol version that this release does not support."""


def check_version(v: int) -> None:
    """Raises VersionMismatch unless `v` is PROTOCOL_VERSION."""
    if v != PROTOCOL_VERSION:
        raise VersionMismatch(f"message version {v} is not supported; supported: {PROTOCOL_VERSION}")


_event_encoder = msgspec.msgpack.Encoder()
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """Returns the event encoded as one frame."""
    return frame(_event_encoder.encode(event))


def decode_event(body: bytes) -> Event:
    """Returns the event that a frame's body encodes. Raises msgspec.DecodeError when the body is not an Event of this
    protocol."""
    event: Event = _event_decoder.decode(body)
    return event
