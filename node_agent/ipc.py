"""Messages between a node's API process and its engine process: msgpack frames over one Unix stream socket.

The API process listens; the engine connects when it is warm and says Ready first. Each side treats the end of the
connection as the death of the other: the API process fails what is in flight, the engine cancels all and reconnects.
A frame is 4 bytes of big-endian length and one message; the engine sends one frame per iteration.
"""

from __future__ import annotations

import msgspec

from cluster.frames import frame
from cluster.messages import Adapter, ColdStart, GenerateRequest
from cluster.news import Resident, StrictRoom
from cluster.performance_model import PerformanceModel
from cluster.residency import AdapterStates, HeldTier, WantedResidency


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request as the gateway sent it, checked."""

    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The caller went, or a stop string was found. Answered by Finished unless the request had ended already."""

    id: str


class ListAdapters(msgspec.Struct, frozen=True, tag="list_adapters"):
    """Answered by Answer, as the next two are, each with the `id` of its question."""

    id: str


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Bring the adapter to the device, or to host memory where the device is full of adapters in use. Answered when it
    is there, or can't be; that may take as long as a load."""

    id: str
    adapter: Adapter
    tenant: str = ""
    """Tenant that asks; empty: the operator."""


class Evict(msgspec.Struct, frozen=True, tag="evict"):
    """Take the adapter away from device, host memory and disk, unless it is in use."""

    id: str
    digest: str


class PrefetchHints(msgspec.Struct, frozen=True, tag="want"):
    """Message with the adapters to bring in while nothing else is to be loaded. It ends with the connection; it is not
    answered."""

    residency: WantedResidency


Question = ListAdapters | Prefetch | Evict
Command = Submit | Cancel | PrefetchHints | Question


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First message of a connection: a dummy prefill and decode have run. Sent again when its CPU workers change."""

    base: str
    device: str
    dtype: str
    max_context: int
    kv_blocks: int
    block_tokens: int
    adapter_bytes: int
    max_rows: int
    largest_adapter: int = 0
    """Bytes; `adapter_itemsize` of them are an element of its weights."""
    adapter_itemsize: int = 0
    host_bytes: int = 0
    """Host memory for adapters."""
    cpu_workers: int = 0
    cpu_workers_reason: str = ""
    cpu_workers_ms: dict[str, float] = {}
    """Milliseconds by which their number was decided (cluster.news.Facts)."""
    takes_wants: bool = True
    """Accepts prefetch hints, as cluster.news.Facts has it."""


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The request left the queue; `state` is where its adapter was (none, host, absent)."""

    id: str
    state: str
    cached_tokens: int = 0
    """Prompt tokens whose keys and values an earlier request left."""


class Top(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one token: the chosen one's and the k most likely (id, log probability)."""

    logprob: float
    top: list[tuple[int, float]]
    rank: int = 0
    """Rank of a prompt's token; 1 is the likeliest."""


class Generated(msgspec.Struct, frozen=True, tag="generated", omit_defaults=True):
    """Token of a request."""

    id: str
    token_id: int
    top: Top | None = None


class PromptScored(msgspec.Struct, frozen=True, tag="prompt_scored"):
    """Log probabilities of the prompt's tokens from `index` on, given those before each."""

    id: str
    index: int
    scores: list[Top]


class Finished(msgspec.Struct, frozen=True, tag="finished", omit_defaults=True):
    """The last message about a request. It frees everything it held before this is sent."""

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
    """The error is that the registry's artifact is not what it must be, or is missing."""
    preemptions: int = 0
    """Times that it gave its place in the batch to a strict request, to be computed again later."""
    device: float = 0.0
    """Seconds of the passes that computed it, its part."""


class Stats(msgspec.Struct, frozen=True, tag="stats", omit_defaults=True):
    """A picture of the engine, sent on change and at least every 0.2 s. What was said before it on the connection is in
    it."""

    running: int
    queued: int
    kv_blocks_free: int
    adapter_bytes_free: int
    batch_ranks: list[int]
    batch_contexts: list[int]
    residents: list[Resident]
    batch_slots: list[int] = []
    """Slot of the adapter of each running request; -1: the base alone."""
    prompt_tokens_left: int = 0
    """Prompt tokens of running requests that are not computed yet."""
    loading_bytes: int = 0
    performance: PerformanceModel | None = None
    forecast_ratio: float | None = None
    measuring: float | None = None
    """Share of the performance model's measurement that is done; None: none is under way."""
    tightest_tpot: float | None = None
    """Seconds; the least that any request here was promised."""
    strict: StrictRoom | None = None
    """Room for strict requests: `prompt_tokens` counts running requests alone; `queued` is not reported."""
    prefetches: int = 0
    """Predicted ones that are under way."""
    prefetch_useful_bytes: int = 0
    """Bytes, like the next two, as in cluster.news.Heartbeat."""
    prefetch_late_bytes: int = 0
    prefetch_wasted_bytes: int = 0

    def running_ranks(self) -> list[tuple[int | None, int]]:
        """Returns, for each running request, its adapter's slot (None for the base alone) and rank."""
        slots = [slot if slot >= 0 else None for slot in self.batch_slots]
        return list(zip(slots, self.batch_ranks, strict=True))


class Answer(msgspec.Struct, frozen=True, tag="answer", omit_defaults=True):
    """Answer to one question. `error_type` is one of cluster.errors.STATUS, or empty."""

    id: str
    found: AdapterStates | None = None
    tier: HeldTier | None = None
    """Tier in which the adapter is now."""
    error_type: str = ""
    error: str = ""


EngineEvent = Ready | Admitted | PromptScored | Generated | Finished | Stats | Answer


_encoder = msgspec.msgpack.Encoder()
command_decoder = msgspec.msgpack.Decoder(list[Command])
event_decoder = msgspec.msgpack.Decoder(list[EngineEvent])


def encode(messages: list[Command] | list[EngineEvent]) -> bytes:
    """Returns one frame with all of `messages`."""
    return frame(_encoder.encode(messages))
