"""Messages between a node's API process and its engine process: msgpack frames over one Unix stream socket.

The API process listens. The engine connects when it is warm and sends Ready first. Each side treats the end of the
connection as the death of the other. The API process then fails all requests in flight; the engine cancels them and
reconnects. A frame is a 4-byte big-endian length and a list of messages. The engine sends one frame per iteration.
"""

from __future__ import annotations

import msgspec

from cluster.device_memory import DeviceMemory
from cluster.frames import frame
from cluster.messages import Adapter, ColdStart, GenerateRequest
from cluster.news import Resident, StrictRoom, VllmLoad
from cluster.performance_model import PerformanceModel
from cluster.residency import AdapterStates, HeldTier, WantedResidency


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Validated request from the gateway."""

    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Message that cancels a request: the caller disconnected, or a stop string was found. Answered by Finished unless
    the request had already ended."""

    id: str


class ListAdapters(msgspec.Struct, frozen=True, tag="list_adapters"):
    """Question for the states of all adapters. An Answer with the same `id` follows, as for the next three
    messages."""

    id: str


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Request to load an adapter to the device, or only to host memory if adapters in use fill the device. Answered
    when the load has ended or failed, which may take long."""

    id: str
    adapter: Adapter
    tenant: str = ""
    """Tenant that asks for the prefetch; empty: the operator."""


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """Request to evict an adapter from device, host memory and disk, unless it is in use."""

    id: str
    digest: str


class ReadMetrics(msgspec.Struct, frozen=True, tag="read_metrics"):
    """Question for the metrics of the library that computes the tokens."""

    id: str


class PrefetchHints(msgspec.Struct, frozen=True, tag="want"):
    """Adapters to prefetch while no other load is pending. The hints are valid until the connection ends. There is no
    answer to them."""

    residency: WantedResidency


AdapterQuestion = ListAdapters | Prefetch | Evict
Question = AdapterQuestion | ReadMetrics
Command = Submit | Cancel | PrefetchHints | Question


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First message of a connection, sent after a dummy prefill and decode. Sent again when the CPU workers change."""

    base: str
    device: str
    dtype: str
    max_context: int
    kv_blocks: int
    block_tokens: int
    adapter_bytes: int
    max_rows: int
    largest_adapter: int = 0
    """Maximum bytes of an adapter on this node. `adapter_itemsize` is the bytes of one element of its weights."""
    adapter_itemsize: int = 0
    host_bytes: int = 0
    """Host memory for adapters, in bytes."""
    cpu_workers: int = 0
    cpu_workers_reason: str = ""
    cpu_workers_ms: dict[str, float] = {}
    """Measured milliseconds by which the number of workers was decided, by name (cluster.news.Facts)."""
    takes_wants: bool = True
    """True if the engine accepts prefetch hints (cluster.news.Facts)."""
    rank_limit: int = 0
    """Largest rank of an adapter that the engine takes; 0: any. `device_memory`: as in cluster.news.Facts."""
    device_memory: DeviceMemory | None = None


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """Message that a request has left the queue. `state`: where its adapter was; none (on the device, or no adapter),
    host, disk or absent."""

    id: str
    state: str


class Top(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token, and those of the k likeliest tokens as (id, log probability)."""

    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0
    """Rank of a prompt token among all tokens; 1 is the likeliest."""


class Generated(msgspec.Struct, frozen=True, tag="generated", omit_defaults=True):
    """Generated token of a request."""

    id: str
    token_id: int
    top: Top | None = None


class PromptScored(msgspec.Struct, frozen=True, tag="prompt_scored"):
    """Log probabilities of the prompt's tokens from `index` on."""

    id: str
    index: int
    scores: list[Top]


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """Last message about a request. The request's resources are already free when it is sent."""

    id: str
    reason: str
    """stop, length, timeout, cancelled, or error"""
    queue: float
    """Seconds in the queue."""
    prefill: float
    """Seconds from admission to the first token."""
    cold_start: ColdStart
    error_type: str = ""
    error: str = ""
    damaged: bool = False
    """True if the request failed because the registry's artifact is corrupt or missing."""
    preemptions: int = 0
    """Number of times that the request was preempted, to be computed again later."""
    device: float = 0.0
    """The request's share of the seconds of the passes that computed it."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


class Stats(msgspec.Struct, frozen=True, tag="stats", omit_defaults=True):
    """Snapshot of the engine, sent on change and at least every 0.2 s. It includes the effect of all earlier messages
    on the connection."""

    running: int
    queued: int
    kv_blocks_free: int
    adapter_bytes_free: int
    batch_ranks: list[int]
    batch_contexts: list[int]
    residents: list[Resident]
    batch_slots: list[int] = []
    """Adapter slot of each running request; -1 for the base model."""
    prompt_tokens_left: int = 0
    """Prompt tokens of running requests that are not yet computed."""
    loading_bytes: int = 0
    performance: PerformanceModel | None = None
    forecast_ratio: float | None = None
    measuring: float | None = None
    """Finished share, 0 to 1, of the measurement of the performance model; None: no measurement is running."""
    tightest_tpot: float | None = None
    """Smallest time per output token that is promised to any request of this engine, in seconds."""
    strict: StrictRoom | None = None
    """Rows, KV blocks and pending prompt tokens that a new strict request would find. `prompt_tokens` counts running
    requests only; `queued` is not reported."""
    prefetches: int = 0
    """Number of predicted prefetches in progress."""
    prefetch_useful_bytes: int = 0
    """Bytes of predicted prefetches that were useful. The next two fields count late and wasted ones
    (cluster.news.Heartbeat)."""
    prefetch_late_bytes: int = 0
    prefetch_wasted_bytes: int = 0
    vllm: VllmLoad | None = None
    """vLLM's own figures (cluster.news.Heartbeat)."""

    def running_ranks(self) -> list[tuple[int | None, int]]:
        """Returns (adapter slot, rank) of each running request; the slot is None for the base model."""
        slots = [slot if slot >= 0 else None for slot in self.batch_slots]
        return list(zip(slots, self.batch_ranks, strict=True))


class Answer(msgspec.Struct, frozen=True, tag="answer", omit_defaults=True):
    """Answer to one question. `error_type` is a key of cluster.errors.STATUS, or empty."""

    id: str
    found: AdapterStates | None = None
    tier: HeldTier | None = None
    """Highest tier that now has the adapter."""
    metrics: str = ""
    """Prometheus text."""
    error_type: str = ""
    error: str = ""


EngineEvent = Ready | Admitted | PromptScored | Generated | Finished | Stats | Answer


_encoder = msgspec.msgpack.Encoder()
command_decoder = msgspec.msgpack.Decoder(list[Command])
event_decoder = msgspec.msgpack.Decoder(list[EngineEvent])


def encode(messages: list[Command] | list[EngineEvent]) -> bytes:
    """Returns one frame with all of `messages`."""
    return frame(_encoder.encode(messages))
