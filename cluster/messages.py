"""Messages between gateway and nodes, as msgpack. Every message carries PROTOCOL_VERSION in its `v`.

Gateway -> node (HTTP, each with `authorization: Bearer <cluster secret>`):

    POST /generate   body GenerateRequest; the reply is a stream of frames, each 4 bytes of big-endian length and one
                     Event. The last frame is Done or Failed. Closing the connection cancels the request.
    GET  /record     News, all that there is to tell
    POST /drain, /undrain          204; running requests end, new ones are refused
    GET  /adapters, POST /adapters/prefetch, /adapters/evict: cluster.residency
    GET  /healthz    no secret needed; 200 when the process is alive

Node -> gateway:

    POST /cluster/record   body News, every RECORD_INTERVAL seconds; the reply is 204, or 200 with Wanted
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypedDict

import msgspec

from cluster.frames import frame
from cluster.performance_model import PerformanceModel
from cluster.received import Received

PROTOCOL_VERSION = 1
PARAMETERS_VERSION = 2
"""Of a GenerateRequest that states one of NEWER_PARAMETERS. Nodes that would ignore these refuse the version, and get
no such call (`NodeRecord.accepts`). A request that states none of them is version 1, which all nodes serve."""
RESUMPTION_VERSION = 3
"""Of a GenerateRequest with tokens that another node has `generated`."""
ACCEPTED_VERSIONS = (PROTOCOL_VERSION, PARAMETERS_VERSION, RESUMPTION_VERSION)
"""The version before the current one joins this tuple when there is one."""
NEWEST_VERSION = ACCEPTED_VERSIONS[-1]
RECORD_VERSION = 2
"""Of what nodes tell; cluster.old_record has version 1."""

RECORD_INTERVAL = 0.2
"""Seconds between two records of a node."""
RECORD_EXPIRY = 2.0
"""Seconds after which a node that sent no record counts as gone."""
WHOLE = -1
ABSENT_TIER = "absent"


SloClass = Literal["strict", "standard", "best_effort"]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen, and which of them end the text. The one struct that carries a call's parameters from the
    gateway to the engine.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 are off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    """Which of several choices of one request this is (`n` on /v1)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    """None: none. k: the chosen token's log probability and the k most likely ones."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that the prompt or the output has."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit."""
    min_tokens: int = 0
    """Before so many tokens are generated, end tokens and `stop_token_ids` are masked and stop strings don't count."""
    stop_token_ids: list[int] = []
    bad_words: list[list[int]] = []
    """Token sequences that the output must not have."""
    prompt_logprobs: int | None = None
    """As `logprobs`, of the prompt's tokens but the first."""
    skip_special_tokens: bool = True
    include_stop: bool = False
    """The stop string, or the token that ends the text, is part of the text."""


NEWER_PARAMETERS = (
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop",
)
"""Fields of Sampling that nodes of protocol version 1 don't know."""


def version_for(sampling: Sampling) -> int:
    """The protocol version that a node must serve so as not to ignore any of these parameters."""
    plain = all(getattr(sampling, field) == getattr(_PLAIN, field) for field in NEWER_PARAMETERS)
    return PROTOCOL_VERSION if plain else PARAMETERS_VERSION


_PLAIN = Sampling()


class Adapter(msgspec.Struct, frozen=True):
    """An adapter version as nodes know it; names stay in the gateway."""

    digest: str
    artifact: str
    """Object key of the serving artifact in the registry."""
    bytes: int
    ranks: tuple[int, ...]


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
    """None: the base model alone."""
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
    included; the node goes on behind them, and sends what comes after."""
    place: int = 0
    """Number of the place that is reserved for it (cluster.received); 0: it has none."""
    v: int = PROTOCOL_VERSION


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    token: str
    token_id: int
    logprob: float
    top: list[TopLogprob] = []
    rank: int = 0
    """Among the whole vocabulary, of a prompt's token; 1 is the likeliest. 0: not asked for."""


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    logprob: float


class Started(msgspec.Struct, frozen=True, tag_field="event", tag="started", omit_defaults=True):
    """The request left the queue. Times are seconds since receipt."""

    node: str
    cold_start: str
    """Where the adapter was when the request arrived: none (on the device, or base), host, disk, absent."""
    v: int = PROTOCOL_VERSION


class Token(msgspec.Struct, frozen=True, tag_field="event", tag="token", omit_defaults=True):
    """Newly decoded text. `text` may be empty (a character is incomplete, or a stop string may be starting)."""

    text: str
    token_ids: list[int]
    index: int
    """Index of the first of `token_ids` among the generated tokens."""
    logprobs: list[TokenLogprob] = []


class PromptLogprobs(msgspec.Struct, frozen=True, tag_field="event", tag="prompt_logprobs", omit_defaults=True):
    """Of the prompt's tokens from `index` on; the prompt's first token has none. All come before the first Token."""

    index: int
    logprobs: list[TokenLogprob]


class ColdStart(msgspec.Struct, frozen=True):
    """What the adapter's load cost this request (seconds); `exposed` is time in which computation waited for bytes."""

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
    """How often the request gave its place in the batch to a strict one and was computed again."""


class Done(msgspec.Struct, frozen=True, tag_field="event", tag="done", omit_defaults=True):
    finish_reason: str
    """stop, length, timeout or cancelled"""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing
    text: str = ""
    """What was still held back for an incomplete character or a possible stop string."""
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


class Resident(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    tier: str
    """device, host or disk; ABSENT_TIER: it is not there any more"""
    bytes: int
    in_use: int
    """Requests that hold a lease."""


class StrictRoom(msgspec.Struct, frozen=True, array_like=True):
    """What the next strict request finds on a node."""

    rows: int = 0
    """That it could have at once: free ones, and those that best-effort requests would give up to it."""
    blocks: int = 0
    """The same of KV blocks."""
    queued: int = 0
    """Strict requests that wait before it."""
    prompt_tokens: int = 0
    """Of strict requests, waiting and running, that are not computed yet: they come before others'."""
    paused_rows: int = 0
    """Of the requests that run, how many a step has fewer on average while best effort pauses for a strict request's
    time between tokens."""
    paused_contexts: int = 0
    """The same of their contexts' tokens."""
    tightest_tpot: float | None = None
    """NodeRecord's, of strict requests alone: best effort pauses as far as it asks for."""


class Beat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What changes all the time: sums and maxima, so that its size depends on nothing (some 200 bytes). New fields come
    last."""

    id: str
    epoch: str
    """Drawn at each start of the API process: a new epoch replaces the old record whatever `seq` says."""
    seq: int
    state: str
    """warming, ready or draining"""
    running: int
    queued: int
    kv_blocks_free: int
    contexts: int = 0
    """Tokens, summed over running requests."""
    max_rank: int = 0
    """Of the adapters of all requests, waiting and running."""
    request_ranks: int = 0
    """Summed over these requests."""
    adapter_ranks: int = 0
    """The same, but an adapter that several running requests share counts once."""
    prompt_tokens_left: int = 0
    """Tokens of prompts, waiting and running, that are not computed yet."""
    tightest_tpot: float | None = None
    """The least that any request here, waiting or running, was promised between two tokens (seconds), but for what the
    node could not keep for one request alone."""
    strict: StrictRoom | None = None
    """None: it does not tell, and strict requests find what all find."""
    loading_bytes: int = 0
    """On their way to the device."""
    adapter_bytes_free: int = 0
    forecast_ratio: float | None = None
    """Median of observed / forecast over its last passes, by `performance`; None: it has computed none."""
    measuring: float | None = None
    """How much of the measurement that will give it a `performance` is done (0 to 1); None: none goes on."""
    received: Received = Received()
    """Which places given away on it have become requests; ends their reservations."""
    v: int = RECORD_VERSION


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What hardly ever changes, and is told when it does."""

    url: str
    base: str
    base_id: str
    max_context: int
    queue_limit: int
    kv_blocks: int
    block_tokens: int
    max_rows: int = 0
    """Requests that it computes at once; 0: not known yet."""
    performance: PerformanceModel | None = None
    """None: not measured."""
    adapter_bytes: int = 0
    largest_adapter: int = 0
    """Bytes that one adapter may have here; calls of a larger one are answered `too_large`. 0: not reported."""
    adapter_itemsize: int = 0
    """Bytes of an element of an adapter's weights here, whatever its file has. 0: not reported."""
    device: str = ""
    error: str = ""
    """Why the engine is not ready, when it is not."""
    pool: str = ""
    """The node pool that it belongs to; empty: none."""
    accepts: int = PROTOCOL_VERSION
    """The newest version of GenerateRequest that it serves."""


class NodeRecord(Beat, frozen=True, array_like=False, kw_only=True, omit_defaults=True):
    """A node as the scheduler sees it: its latest Beat with its latest Facts."""

    url: str
    base: str
    base_id: str
    max_context: int
    queue_limit: int
    kv_blocks: int
    block_tokens: int
    max_rows: int = 0
    performance: PerformanceModel | None = None
    adapter_bytes: int = 0
    largest_adapter: int = 0
    adapter_itemsize: int = 0
    device: str = ""
    error: str = ""
    pool: str = ""
    accepts: int = PROTOCOL_VERSION


def record_from(beat: Beat, facts: Facts) -> NodeRecord:
    return NodeRecord(**msgspec.structs.asdict(beat), **msgspec.structs.asdict(facts))


def beat_of(record: NodeRecord) -> Beat:
    return Beat(**{name: getattr(record, name) for name in Beat.__struct_fields__})


def facts_of(record: NodeRecord) -> Facts:
    return Facts(**{name: getattr(record, name) for name in Facts.__struct_fields__})


class RankSums(TypedDict):
    """Of NodeRecord."""

    max_rank: int
    request_ranks: int
    adapter_ranks: int


def rank_sums(running: Sequence[tuple[Hashable, int]], waiting: Sequence[int]) -> RankSums:
    """`running`: of each request what names its adapter, None for the base alone, and its rank; `waiting`: ranks."""
    ranks = [*(rank for _, rank in running), *waiting]
    adapters = {adapter: rank for adapter, rank in running if adapter is not None}
    return RankSums(
        max_rank=max(ranks, default=0),
        request_ranks=sum(ranks),
        adapter_ranks=sum(adapters.values()) + sum(waiting),
    )


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """What a node's facts and residents have become since a change that the receiver may know. Changes are numbered,
    and each entry says how it is now, so what is known already may come again."""

    since: int = WHOLE
    """Number of the change behind which this begins. WHOLE: this is everything, and what is not in it is not there."""
    at: int = 0
    """Number of the last change."""
    residents: list[Resident] = []
    acknowledged: list[str] = []
    """Of a node of protocol version 1, which numbers nothing: ids of requests whose reservations end."""


class News(msgspec.Struct, frozen=True, array_like=True):
    """What a node tells the gateway."""

    beat: Beat
    facts: Facts | None = None
    """None: as they were."""
    changes: Changes = Changes()


def whole(record: NodeRecord, residents: Sequence[Resident] = (), at: int = 0) -> News:
    """All that there is to tell of a node."""
    return News(beat_of(record), facts_of(record), Changes(WHOLE, at, list(residents)))


class Wanted(msgspec.Struct, frozen=True):
    """The gateway's reply to News when it does not know what they build on."""

    wanted: Literal["whole"] = "whole"


class VersionMismatch(ValueError):
    """The other side speaks a protocol version that this side does not."""


def check_version(v: int) -> None:
    if v not in ACCEPTED_VERSIONS:
        raise VersionMismatch(f"message version {v} is not served; served: {ACCEPTED_VERSIONS}")


_event_encoder = msgspec.msgpack.Encoder()
_event_decoder = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One frame."""
    return frame(_event_encoder.encode(event))


def decode_event(body: bytes) -> Event:
    """Raises msgspec.DecodeError when the body is not an Event of this protocol."""
    event: Event = _event_decoder.decode(body)
    return event
