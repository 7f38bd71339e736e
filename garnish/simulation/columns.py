"""The gateway's table of the simulated nodes: a NodeTable that is updated without complete node records.

Rows are computed by NodeTable's code. Two parts of an update are faster than in `NodeTable.put`. The node maintains the
sums that `load_of` would compute, and only adapters whose tier or use has changed are updated. A test compares the
result with that of `put` and `record_of`.
"""

from __future__ import annotations

from functools import cache
from math import inf

import msgspec

from cluster.news import NodeRecord, Resident, rank_sums
from cluster.node_load import NodeLoad
from cluster.node_table import ABSENT, DEVICE, HOST, NodeTable
from cluster.performance_model import PerformanceModel
from cluster.resident_index import ResidentIndex
from garnish.simulation.node import SimulatedNode

BASE = "base"
TIER_NAMES = {DEVICE: "device", HOST: "host"}


def record_of(node: SimulatedNode, now: float, seq: int) -> NodeRecord:
    """Returns the record that the node would send at the time `now`."""
    profile = node.profile
    return NodeRecord(
        id=f"node-{node.index:04}",
        epoch="1",
        seq=seq,
        url="",
        state="ready",
        base=BASE,
        base_id=BASE,
        max_context=profile.max_context,
        running=len(node.running),
        queued=len(node.queue),
        queue_limit=profile.queue_limit,
        kv_blocks_free=node.kv_free // profile.block_tokens,
        kv_blocks=profile.kv_tokens // profile.block_tokens,
        block_tokens=profile.block_tokens,
        max_rows=profile.max_rows,
        contexts=sum(node.context(job, now) for job in node.running),
        **rank_sums(
            [(job.digest, job.rank) for job in node.running],
            [job.rank for job in node.queue],
            profile.performance.decode.padded_rank,
        ),
        prompt_tokens_left=node.prompt_left(),
        tightest_tpot=node.tightest_tpot(),
        loading_bytes=node.loads.loading_bytes,
        performance=as_served(profile.performance, BASE),
        adapter_bytes_free=node.loads.memory.free if profile.adapter_memory is not None else 0,
        adapter_bytes=profile.adapter_memory or 0,
    )


def residents_of(node: SimulatedNode) -> list[Resident]:
    memory = node.loads.memory
    return [
        Resident(digest, TIER_NAMES.get(memory.tier(digest), "loading"), 0, memory.leases(digest))
        for digest in sorted({*memory.device, *memory.host})
    ]


@cache
def as_served(model: PerformanceModel, base: str) -> PerformanceModel:
    """Returns the performance model with its base model replaced by `base`."""
    return msgspec.structs.replace(model, key=msgspec.structs.replace(model.key, base=base))


def _load(node: SimulatedNode, now: float) -> NodeLoad:
    """Returns the load that `load_of` would compute from the node's record."""
    profile, running, queued = node.profile, node.running_mix, node.queued_mix
    block, tpot = profile.block_tokens, node.tightest_tpot()
    return NodeLoad(
        ready=True,
        running=running.rows,
        queued=queued.rows,
        queue_limit=profile.queue_limit,
        max_rows=profile.max_rows,
        max_context=profile.max_context,
        kv_tokens_free=node.kv_free // block * block,
        kv_tokens=profile.kv_tokens // block * block,
        contexts=node.contexts(now),
        prompt_tokens=node.prompt_left(),
        max_rank=max(running.max_rank, queued.max_rank),
        request_ranks=running.request_ranks + queued.request_ranks,
        adapter_ranks=running.adapter_ranks + queued.request_ranks,
        tightest_tpot=inf if tpot is None else tpot,
        loading_bytes=node.loads.loading_bytes,
    )


class _Index(ResidentIndex):
    """A ResidentIndex that is updated for single adapters.

    Some nodes have all adapters in one tier, without a list of them in their records. `everywhere` has this tier by the
    node's row.
    """

    def __init__(self, nodes: list[SimulatedNode]) -> None:
        super().__init__(len(nodes))
        self.everywhere = {
            node.index: DEVICE if node.profile.adapter_memory is None else HOST
            for node in nodes
            if node.profile.adapter_memory is None or node.profile.host_memory is None
        }

    def tiers(self, digest: str) -> dict[int, int]:
        listed = super().tiers(digest)
        return {**self.everywhere, **listed} if self.everywhere else listed

    def receive(self, row: int, digest: str, tier: int, used: bool) -> None:
        """Updates one adapter's tier and use on a node, as `put` would from the node's record."""
        self._place(row, digest, ABSENT if tier == self.everywhere.get(row) else tier, used)


class SimulatedTable(NodeTable):
    def __init__(self, nodes: list[SimulatedNode]) -> None:
        super().__init__(len(nodes))
        self._residents: _Index = _Index(nodes)
        for node in nodes:
            row = self.put(record_of(node, 0.0, 0), 0.0, residents=residents_of(node))
            assert row == node.index

    def receive(self, node: SimulatedNode, now: float) -> None:
        """Updates the node's row as the node's record at the time `now` would."""
        row = node.index
        self._loads[row] = _load(node, now)
        demands = self._demands[row]
        for request_id in node.acknowledged:
            demands.pop(request_id, None)
        node.acknowledged.clear()
        memory = node.loads.memory
        for digest in memory.changed:
            self._residents.receive(row, digest, memory.tier(digest), memory.leases(digest) > 0)
        memory.changed.clear()
        self.last_seen[row] = now
        self._refresh(row)
