"""Reports of nodes: a heartbeat that changes all the time, facts that rarely change, and the adapters that a node
holds.

A node posts a NodeReport every RECORD_INTERVAL seconds. The report has only the facts and adapters that changed since
the last report that the gateway accepted.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypedDict

import msgspec

from cluster.device_memory import DeviceMemory
from cluster.gpu import GpuFacts, GpuLoad
from cluster.messages import PROTOCOL_VERSION
from cluster.performance_model import PerformanceModel, counted_rank
from cluster.received import Received

RECORD_INTERVAL = 0.2
"""Seconds between two reports of a node."""
RECORD_EXPIRY = 2.0
"""Seconds without a report after which a node counts as gone."""
FULL_REPORT = -1
"""Change number before the first one: changes since it are a full report."""
ABSENT_TIER = "absent"


class Resident(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that a node holds."""

    digest: str
    tier: str
    """Tier of the adapter: device, host or disk. ABSENT_TIER: the node no longer holds it."""
    bytes: int
    in_use: int
    """Number of requests that hold a lease on the adapter."""


class StrictRoom(msgspec.Struct, frozen=True, array_like=True):
    """Room that the next strict request finds on a node."""

    rows: int = 0
    """Number of batch rows that this request could get at once: free rows, and rows that best-effort requests would
    give up."""
    blocks: int = 0
    """Number of KV blocks that this request could get at once, counted like `rows`."""
    queued: int = 0
    """Number of strict requests queued before this request."""
    prompt_tokens: int = 0
    """Prompt tokens of queued and running strict requests that are not computed yet. They are computed before the
    prompts of other requests."""
    paused_rows: int = 0
    """Average number of rows by which a step shrinks while best-effort requests pause to keep a strict request's
    TPOT."""
    paused_contexts: int = 0
    """Average number of context tokens by which a step shrinks during such a pause."""
    tightest_tpot: float | None = None
    """Tightest TPOT (seconds) promised to strict requests alone. Best-effort requests pause as often as it requires."""


class VllmLoad(msgspec.Struct, frozen=True, array_like=True):
    """vLLM's own figures, on a node that drives vLLM."""

    running: int = 0
    """Number of requests in vLLM's batch."""
    waiting: int = 0
    """Number of requests that vLLM has and does not compute: preempted ones, and those that it has just got."""
    kv_usage: float = 0.0
    """Share of vLLM's KV blocks in use, 0 to 1."""
    preemptions: int = 0
    """Number of times since the engine's start that vLLM preempted a request because its KV blocks ran out."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Part of a report that changes all the time. It holds sums and maxima only, so its size (some 200 bytes) does not
    depend on the load. New fields come last."""

    id: str
    epoch: str
    """Random id drawn at each start of the API process. A new epoch replaces the old record, whatever its `seq`."""
    seq: int
    state: str
    """State of the node: warming, ready or draining."""
    running: int
    queued: int
    kv_blocks_free: int
    contexts: int = 0
    """Context tokens, summed over the running requests."""
    max_rank: int = 0
    """Largest adapter rank among all queued and running requests."""
    request_ranks: int = 0
    """Adapter ranks, summed over all queued and running requests."""
    adapter_ranks: int = 0
    """Adapter ranks, summed over all queued and running requests. An adapter that several running requests share counts
    once."""
    prompt_tokens_left: int = 0
    """Prompt tokens of queued and running requests that are not computed yet."""
    tightest_tpot: float | None = None
    """Tightest TPOT (time between two tokens, seconds) promised to a queued or running request. SLOs that the node
    could not meet even for a single request are left out."""
    strict: StrictRoom | None = None
    """Room for strict requests. None: not reported, and strict requests find the same room as all others."""
    loading_bytes: int = 0
    """Bytes being transferred to the device."""
    adapter_bytes_free: int = 0
    forecast_ratio: float | None = None
    """Median ratio of observed to forecast time over the node's last passes, by its `performance` model. None: no
    passes yet."""
    measuring: float | None = None
    """Progress (0 to 1) of the measurement that will give the node a `performance` model; None: none is running."""
    received: Received = Received()
    """Reserved places whose requests the node has received. The gateway then ends the reservations."""
    v: int = PROTOCOL_VERSION
    prefetches: int = 0
    """Number of forecast-driven prefetches in progress."""
    prefetch_useful_bytes: int = 0
    """Bytes of forecast-driven prefetches, since the engine's start, that had arrived when the adapter was called."""
    prefetch_late_bytes: int = 0
    """Bytes of forecast-driven prefetches that had not arrived yet when the adapter was called."""
    prefetch_wasted_bytes: int = 0
    """Bytes of prefetched adapters that were evicted, or no longer wanted, before they were called."""
    gpu_load: GpuLoad | None = None
    """Load of the node's GPU. None: the node has no GPU, or can't read its load."""
    best_effort: int = 0
    """Number of best-effort requests among `running` and `queued`."""
    vllm: VllmLoad | None = None
    """vLLM's own figures. None: the node's engine is another one, or is not ready."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a report that rarely changes, and is sent only when it has changed."""

    url: str
    base: str
    base_id: str
    max_context: int
    queue_limit: int
    kv_blocks: int
    block_tokens: int
    max_rows: int = 0
    """Maximum number of requests in one batch; 0: not known yet."""
    performance: PerformanceModel | None = None
    """Measured performance model; None: not measured."""
    adapter_bytes: int = 0
    host_bytes: int = 0
    """Host memory for adapters, in bytes; 0: not reported."""
    largest_adapter: int = 0
    """Maximum size of one adapter on this node, in bytes. Calls of a larger adapter are answered `too_large`. 0: not
    reported."""
    adapter_itemsize: int = 0
    """Bytes per element of adapter weights on this node, whatever the dtype of the file. 0: not reported."""
    takes_wants: bool = True
    """True: the node prefetches all adapters that are wanted. False: it prefetches only those that are provisioned."""
    device: str = ""
    error: str = ""
    """Reason why the engine is not ready."""
    pool: str = ""
    """Node pool that the node belongs to; empty: none."""
    cpu_workers: int | None = None
    """Number of CPU LoRA workers that assist cold calls; None: not reported."""
    cpu_workers_reason: str = ""
    """Reason for the number of CPU workers."""
    cpu_workers_ms: dict[str, float] = {}
    """Measured times (milliseconds, by name) that decided the number of CPU workers: `warm`, `exposed`,
    `first_token_assist`, ..."""
    gpu: GpuFacts | None = None
    """Facts of the node's GPU. None: the node has no GPU, or can't read them."""
    engine: str = "garnish"
    """Engine of the node: garnish or vllm."""
    rank_limit: int = 0
    """Largest rank of an adapter that the node takes. Calls of adapters above it go to other nodes. 0: any rank, or not
    known yet."""
    device_memory: DeviceMemory | None = None
    """Division of each device's memory. None: not fixed at the engine's start."""


class NodeRecord(Heartbeat, frozen=True, array_like=False, kw_only=True, omit_defaults=True):
    """Record of a node: its latest Heartbeat together with its latest Facts."""

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
    engine: str = "garnish"
    rank_limit: int = 0
    device_memory: DeviceMemory | None = None


def record_from(heartbeat: Heartbeat, facts: Facts) -> NodeRecord:
    """Returns the node's record made of its heartbeat and facts."""
    return NodeRecord(**msgspec.structs.asdict(heartbeat), **msgspec.structs.asdict(facts))


def heartbeat_from(record: NodeRecord) -> Heartbeat:
    """Returns the heartbeat that the record contains."""
    return Heartbeat(**{name: getattr(record, name) for name in Heartbeat.__struct_fields__})


def facts_from(record: NodeRecord) -> Facts:
    """Returns the facts that the record contains."""
    return Facts(**{name: getattr(record, name) for name in Facts.__struct_fields__})


class RankSums(TypedDict):
    """Sums of ranks in a NodeRecord."""

    max_rank: int
    request_ranks: int
    adapter_ranks: int


def rank_sums(running: Sequence[tuple[Hashable, int]], waiting: Sequence[int], padded_rank: int = 0) -> RankSums:
    """Returns the sums of ranks over a node's requests. `running` has one (adapter key, rank) pair per request; the key
    is None for the base model alone. `waiting` has the rank of each queued request. `padded_rank`: that of the node's
    model of decode steps."""
    running = [(adapter, counted_rank(rank, padded_rank)) for adapter, rank in running]
    waiting = [counted_rank(rank, padded_rank) for rank in waiting]
    ranks = [*(rank for _, rank in running), *waiting]
    adapters = {adapter: rank for adapter, rank in running if adapter is not None}
    return RankSums(
        max_rank=max(ranks, default=0),
        request_ranks=sum(ranks),
        adapter_ranks=sum(adapters.values()) + sum(waiting),
    )


class Changes(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a node's facts and residents since an earlier change. Changes are numbered. Each entry has the current
    state of its adapter, so a change may be sent twice."""

    since: int = FULL_REPORT
    """Number of the change after which these begin. FULL_REPORT: the list is complete, and the node holds no other
    adapters."""
    at: int = 0
    """Number of the last change included."""
    residents: list[Resident] = []


class NodeReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of a node to the gateway: its heartbeat, and what has changed."""

    heartbeat: Heartbeat
    facts: Facts | None = None
    """Facts of the node; None: unchanged."""
    changes: Changes = Changes()


def full_report(record: NodeRecord, residents: Sequence[Resident] = (), at: int = 0) -> NodeReport:
    """Returns a report with everything about a node: heartbeat, facts and all residents. `at` is the number of the last
    change."""
    return NodeReport(heartbeat_from(record), facts_from(record), Changes(FULL_REPORT, at, list(residents)))


class FullReportRequest(msgspec.Struct, frozen=True):
    """The gateway's reply to a NodeReport that builds on changes it has not received: it requests a full report."""

    wanted: Literal["whole"] = "whole"
