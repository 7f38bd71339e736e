"""Messages between gateway and nodes, as msgpack. Every message has PROTOCOL_VERSION in its `v`; others are refused.

Gateway -> node (HTTP, each with `authorization: Bearer <cluster secret>`):

    POST /generate   body GenerateRequest; the reply is a stream of frames, each 4 bytes of big-endian length and one
                     Event. The last frame is Done or Failed. Closing the connection cancels the request.
    GET  /record     NodeReport, all that there is to report
    POST /drain, /undrain          204; running requests end, new ones are refused
    GET  /adapters, POST /adapters/prefetch, /adapters/evict: cluster.residency
    GET  /healthz    no secret needed; 200 when the process is alive

Node -> gateway:

    POST /cluster/record   body NodeReport (cluster.news), every RECORD_INTERVAL seconds; the reply is 204, or 200 with
                           FullReportRequest
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.frames import frame

PROTOCOL_VERSION = 3

SloClass = Literal["strict", "standard", "best_effort"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of sampling, and conditions that end the text. The one struct that carries a call's parameters from
    the gateway to the engine.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 are off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    """Index of the choice among the request's (`n` on /v1)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    """Number of most likely tokens whose log probabilities are returned with the chosen token's; None: no log
    probabilities."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that the prompt or the output has."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit."""
    min_tokens: int = 0
    """Generated tokens before which end tokens and `stop_token_ids` are masked and stop strings don't count."""
    stop_token_ids: list[int] = []
    bad_words: list[list[int]] = []
    """Token sequences that the output must not have."""
    prompt_logprobs: int | None = None
    """Same as `logprobs`, for the prompt's tokens but the first."""
    skip_special_tokens: bool = True
    include_stop: bool = False
    """The stop string, or the token that ends the text, is part of the text."""


class Adapter(msgspec.Struct, frozen=True):
    """An adapter version as nodes know it; names stay in the gateway."""

    digest: str
    artifact: str
    """Object key of the serving artifact in the registry."""
    bytes: int
    ranks: tuple[int, ...]
    itemsize: int = 0
    """Bytes of an element, as `bytes` counts them. 0: not known, for it was deployed by an earlier release."""

    def bytes_in(self, itemsize: int) -> int:
        """Returns the bytes that it takes where an element has `itemsize` bytes; `bytes` where either size is not known
        (0)."""
        return self.bytes // self.itemsize * itemsize if self.itemsize and itemsize else self.bytes


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    base: str
    """Fingerprint of the base model that the caller means; a node with another one answers `unavailable`."""
    tenant: str
    token_ids: list[int]
    max_tokens: int
    sampling: Sampling
    timeout: float
    """Seconds that remain until the caller's deadline, counted from receipt."""
    adapter: Adapter | None = None
    """Adapter to apply; None: the base model alone."""
    stop: list[str] = []
    ignore_eos: bool = False
    function: str = ""
    """An opaque name of the function inside the tenant, for fair shares; empty for the base alone."""
    weight: float = 1.0
    """The tenant's."""
    slo_class: SloClass = "standard"
    ttft: float | None = None
    """Seconds from receipt to the first token that the caller was promised."""
    tpot: float | None = None
    """Seconds between two tokens that the caller was promised."""
    generated: list[int] = []
    """Tokens that another node has generated for this request, and has sent. They count as its output, `max_tokens`
    included; the node continues after them, and sends what comes next."""
    reserved: int = 0
    """Places that are kept for its function. In a full queue it may displace the tenant's calls of other functions,
    while fewer of its function's than that wait there."""
    place: int = 0
    """Number of the place that is reserved for it (cluster.received); 0: it has none."""
    v: int = msgspec.field(default_factory=lambda: PROTOCOL_VERSION)  # a plain default would not be sent


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    token: str
    token_id: int
    logprob: float
    top: list[TopLogprob] = []
    rank: int = 0
    """Rank of a prompt's token in the whole vocabulary; 1 is the likeliest. 0: not asked for."""


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    logprob: float


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="started", omit_defaults=True):
    """The request left the queue."""

    node: str
    cold_start: str
    """Tier of the adapter when the request arrived: none (on the device, or base), host, disk, absent."""
    v: int = PROTOCOL_VERSION


class Token(msgspec.Struct, frozen=True, tag_field="event", tag="token", omit_defaults=True):
    """Newly decoded text. `text` may be empty (a character is incomplete, or a stop string may be starting)."""

    text: str
    token_ids: list[int]
    index: int
    """Index of the first of `token_ids` among the generated tokens."""
    logprobs: list[TokenLogprob] = []


class PromptLogprobs(msgspec.Struct, frozen=True, tag_field="event", tag="prompt_logprobs", omit_defaults=True):
    """Log probabilities of the prompt's tokens from `index` on; the prompt's first token has none. All come before the
    first Token."""

    index: int
    logprobs: list[TokenLogprob]


class ColdStart(msgspec.Struct, frozen=True):
    """Time that the adapter's load cost this request (seconds); `exposed` is time in which computation waited for
    bytes."""

    state: str
    plan: str
    """none, wait, pipeline or assist"""
    load: float
    """0: not at its end when the request ended; so is `fetch`"""
    exposed: float
    fetch: float = 0.0
    """of `load`, until the adapter was in the node's host memory"""
    layers_cpu: int = 0
    layers_device: int = 0
    """layers of prompt chunks that began before the whole adapter was there, by where its part was computed"""
    replays: int = 0
    """chunks computed again because a CPU worker failed"""
    forecast: float = 0.0
    """what `exposed` was planned to be"""


class Timing(msgspec.Struct, frozen=True):
    """Seconds on the node: in the queue (while more than its adapter's bytes kept it there), from then to the first
    token, and in all."""

    queue: float
    prefill: float
    total: float
    cold_start: ColdStart
    preemptions: int = 0
    """Number of times that the request was preempted by a strict one and computed again."""
    device: float = 0.0
    """Share by tokens of the passes that computed it. 0 also where it is not reported."""


class Done(msgspec.Struct, frozen=True, tag_field="event", tag="done", omit_defaults=True):
    finish_reason: str
    """stop, length, timeout or cancelled"""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing
    text: str = ""
    """Text that was still held back for an incomplete character or a possible stop string."""
    stop_reason: int | str | None = None
    """The stop string, or the one of `stop_token_ids`, that ended the text. None: something else did."""


class Failed(msgspec.Struct, frozen=True, tag_field="event", tag="failed", omit_defaults=True):
    """The request ended in an error; `type` is one of cluster.errors.STATUS."""

    type: str
    message: str
    retryable: bool = False
    """No token was computed here, and another node may well succeed."""
    retry_after: float | None = None
    damaged: str = ""
    """The digest of the adapter, when its artifact in the registry is damaged or missing."""


Event = Started | PromptLogprobs | Token | Done | Failed


class VersionMismatch(ValueError):
    """The other side speaks a protocol version that this side does not."""


def check_version(v: int) -> None:
    """Raises VersionMismatch unless `v` is PROTOCOL_VERSION."""
    if v != PROTOCOL_VERSION:
        raise VersionMismatch(f"message version {v} is not served; served: {PROTOCOL_VERSION}")


_event_encoder = msgspec.msgpack.Encoder()
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """Returns one frame with the event."""
    return frame(_event_encoder.encode(event))


def decode_event(body: bytes) -> Event:
    """Returns the event of a frame's body. Raises msgspec.DecodeError when the body is not an Event of this
    protocol."""
    event: Event = _event_decoder.decode(body)
    return event
