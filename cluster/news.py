"""Reports of nodes: a heartbeat that changes all the time, facts that hardly do, and the adapters that a node holds.

A node posts a NodeReport every RECORD_INTERVAL seconds. It passes on only what changed since the gateway last took it
in.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypedDict

import msgspec

from cluster.gpu import GpuFacts, GpuLoad
from cluster.messages import PROTOCOL_VERSION
from cluster.performance_model import PerformanceModel
from cluster.received import Received

RECORD_INTERVAL = 0.2
"""Seconds between two records of a node."""
RECORD_EXPIRY = 2.0
"""Seconds after which a node that sent no record counts as gone."""
WHOLE = -1
ABSENT_TIER = "absent"


class Resident(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    tier: str
    """device, host or disk; ABSENT_TIER: it is not there any more"""
    bytes: int
    in_use: int
    """Requests that hold a lease."""


class StrictRoom(msgspec.Struct, frozen=True, array_like=True):
    """Room that the next strict request finds on a node."""

    rows: int = 0
    """Rows that it could have at once: free ones, and those that best-effort requests would give up to it."""
    blocks: int = 0
    """The same of KV blocks."""
    queued: int = 0
    """Strict requests that wait before it."""
    prompt_tokens: int = 0
    """Tokens of strict requests, waiting and running, that are not computed yet: they come before others'."""
    paused_rows: int = 0
    """Rows that a step has fewer on average while best effort pauses for a strict request's time between tokens."""
    paused_contexts: int = 0
    """The same of their contexts' tokens."""
    tightest_tpot: float | None = None
    """NodeRecord's, of strict requests alone: best effort pauses as far as it asks for."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Part of a report that changes all the time: sums and maxima, so that its size depends on nothing (some 200
    bytes). New fields come last."""

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
    """Largest rank of the adapters of all requests, waiting and running."""
    request_ranks: int = 0
    """Summed over these requests."""
    adapter_ranks: int = 0
    """The same, but an adapter that several running requests share counts once."""
    prompt_tokens_left: int = 0
    """Tokens of prompts, waiting and running, that are not computed yet."""
    tightest_tpot: float | None = None
    """Tightest SLO on the time between two tokens (seconds) of all requests here, waiting or running. SLOs that the
    node could not keep for one request alone are left out."""
    strict: StrictRoom | None = None
    """Room for strict requests. None: not reported, and strict requests find what all find."""
    loading_bytes: int = 0
    """Bytes on their way to the device."""
    adapter_bytes_free: int = 0
    forecast_ratio: float | None = None
    """Median of observed / forecast over its last passes, by `performance`; None: it has computed none."""
    measuring: float | None = None
    """Progress of the measurement that will give it a `performance` (0 to 1); None: none is running."""
    received: Received = Received()
    """Reserved places that have become requests; ends their reservations."""
    v: int = PROTOCOL_VERSION
    prefetches: int = 0
    """Predicted ones that are under way."""
    prefetch_useful_bytes: int = 0
    """Bytes of predicted prefetches since the engine's start that had come when the adapter was called."""
    prefetch_late_bytes: int = 0
    """Bytes that were still to come when it was called."""
    prefetch_wasted_bytes: int = 0
    """Bytes of adapters that were evicted, or no longer wanted, before they were called."""
    gpu_load: GpuLoad | None = None
    """Load of its GPU. None: it has no GPU, or can't read it."""
    best_effort: int = 0
    """Requests of this class, of `running` and `queued`."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a report that hardly ever changes, and is sent when it does."""

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
    """Measured performance model; None: not measured."""
    adapter_bytes: int = 0
    host_bytes: int = 0
    """Bytes of host memory for adapters. 0: not reported."""
    largest_adapter: int = 0
    """Bytes that one adapter may have here; calls of a larger one are answered `too_large`. 0: not reported."""
    adapter_itemsize: int = 0
    """Bytes of an element of an adapter's weights here, whatever its file has. 0: not reported."""
    takes_wants: bool = True
    """True: it prefetches what is wanted before it is called. False: of that only what is provisioned."""
    device: str = ""
    error: str = ""
    """Reason why the engine is not ready."""
    pool: str = ""
    """The node pool that it belongs to; empty: none."""
    cpu_workers: int | None = None
    """CPU LoRA workers that help cold calls; None: not reported."""
    cpu_workers_reason: str = ""
    """Reason for their number."""
    cpu_workers_ms: dict[str, float] = {}
    """Milliseconds by which their number was decided, by name: `warm`, `exposed`, `first_token_assist`, ..."""
    gpu: GpuFacts | None = None
    """Facts of its GPU. None: it has no GPU, or can't read it."""


class NodeRecord(Heartbeat, frozen=True, array_like=False, kw_only=True, omit_defaults=True):
    """A node as the scheduler sees it: its latest Heartbeat with its latest Facts."""

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
    host_bytes: int = 0
    largest_adapter: int = 0
    adapter_itemsize: int = 0
    takes_wants: bool = True
    device: str = ""
    error: str = ""
    pool: str = ""
    cpu_workers: int | None = None
    cpu_workers_reason: str = ""
    cpu_workers_ms: dict[str, float] = {}
    gpu: GpuFacts | None = None


def record_from(heartbeat: Heartbeat, facts: Facts) -> NodeRecord:
    return NodeRecord(**msgspec.structs.asdict(heartbeat), **msgspec.structs.asdict(facts))


def heartbeat_from(record: NodeRecord) -> Heartbeat:
    return Heartbeat(**{name: getattr(record, name) for name in Heartbeat.__struct_fields__})


def facts_from(record: NodeRecord) -> Facts:
    return Facts(**{name: getattr(record, name) for name in Facts.__struct_fields__})


class RankSums(TypedDict):
    """The sums of ranks in a NodeRecord."""

    max_rank: int
    request_ranks: int
    adapter_ranks: int


def rank_sums(running: Sequence[tuple[Hashable, int]], waiting: Sequence[int]) -> RankSums:
    """Returns the sums of ranks over a node's requests. `running`: for each request what names its adapter, None for
    the base alone, and its rank; `waiting`: ranks."""
    ranks = [*(rank for _, rank in running), *waiting]
    adapters = {adapter: rank for adapter, rank in running if adapter is not None}
    return RankSums(
        max_rank=max(ranks, default=0),
        request_ranks=sum(ranks),
        adapter_ranks=sum(adapters.values()) + sum(waiting),
    )


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a node's facts and residents since a change that the receiver may know. Changes are numbered, and each
    entry says how it is now, so that a change may be sent twice."""

    since: int = WHOLE
    """Number of the change behind which this begins. WHOLE: this is everything, and what is not in it is not there."""
    at: int = 0
    """Number of the last change."""
    residents: list[Resident] = []


class NodeReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of a node to the gateway."""

    heartbeat: Heartbeat
    facts: Facts | None = None
    """Facts of the node; None: unchanged."""
    changes: Changes = Changes()


def full_report(record: NodeRecord, residents: Sequence[Resident] = (), at: int = 0) -> NodeReport:
    """Returns news with all that there is to report of a node."""
    return NodeReport(heartbeat_from(record), facts_from(record), Changes(WHOLE, at, list(residents)))


class FullReportRequest(msgspec.Struct, frozen=True):
    """The gateway's reply to NodeReport when it does not know what they build on."""

    wanted: Literal["whole"] = "whole"
