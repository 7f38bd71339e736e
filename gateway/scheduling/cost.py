"""What a request would cost on each node, and how it would fare there: the terms that policies decide by.

Toppings' Algorithm 1 weighs what a request adds to prefill and decode:

    cost = d_prefill / response length + d_decode

with d_prefill = prefill(waiting + request) - prefill(waiting) and d_decode = decode(there + request) - decode(there)
by the node's own performance model. Added here: what the request would wait for its adapter, for the prompts before it,
for a row and for KV memory, so that its first token can be forecast. Every term is a column over the candidates; the
only loop is over the nodes that hold the adapter.
"""

from __future__ import annotations

from functools import cached_property
from typing import get_args

import msgspec
import numpy as np

from cluster.node_table import ABSENT, DEVICE, DISK, HOST, NodeTable
from cluster.performance_model import RankTerm
from gateway.scheduling.request import PlacementRequest

MAX_RANK, ADAPTER_RANKS = (get_args(RankTerm).index(name) for name in ("max_rank", "adapter_ranks"))
"""As the column `rank_term` has them."""


class Terms(msgspec.Struct, dict=True):
    """f64[C], seconds, by candidate, where nothing else is said."""

    candidates: np.ndarray
    """i64[C]: rows of the table"""
    requests: np.ndarray
    """running, waiting and reserved, without this one"""
    tier: np.ndarray
    """i64[C]: DEVICE, HOST, DISK or ABSENT; DEVICE for the base alone"""
    prefill: np.ndarray
    """d_prefill: what the prompt adds to the prompts that wait"""
    exposed: np.ndarray
    """what the first token waits for the adapter's bytes"""
    decode: np.ndarray
    """d_decode: what the request adds to every step"""
    step: np.ndarray
    """a decode step with the request in the batch"""
    wait: np.ndarray
    """before its prompt is begun: for prompts, a row, memory"""
    ttft: np.ndarray
    """from its arrival to its first token"""
    tpot_limit: np.ndarray
    """the least that anyone there, or the request, was promised; infinite where nobody was"""
    ttft_limit: float
    answer: float
    """tokens that its answer will have, as expected"""

    @cached_property
    def cost(self) -> np.ndarray:
        cost: np.ndarray = (self.prefill + self.exposed) / self.answer + self.decode
        return cost

    @cached_property
    def strain(self) -> np.ndarray:
        """How much of its promise the worse of the two forecasts uses up: above 1 it breaks it, and NaN counts so."""
        strain: np.ndarray = np.maximum(self.step / self.tpot_limit, self.ttft / self.ttft_limit)
        return strain


def terms(nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Terms:
    """`candidates` i64[C], ascending, C >= 1."""
    # Slices cost nothing and picking rows does: everything is computed for all rows up to the last candidate.
    n = int(candidates[-1]) + 1
    with np.errstate(all="ignore"):  # rows without a node
        made = _terms(nodes, candidates, n, request)
    if n == candidates.size:
        return made
    for name in Terms.__struct_fields__[1:]:
        column = getattr(made, name)
        if isinstance(column, np.ndarray):
            setattr(made, name, column[candidates])
    return made


def _terms(nodes: NodeTable, candidates: np.ndarray, n: int, request: PlacementRequest) -> Terms:
    tokens, rank, answer = request.prompt_tokens, request.rank, request.answer_tokens
    requests = nodes.running[:n] + nodes.queued[:n] + nodes.reserved[:n]
    after = requests + 1.0
    # Rows beyond what the node computes at once wait: a step has no more than that.
    capacity = np.where(nodes.max_rows[:n] > 0, nodes.max_rows[:n], np.inf)
    decode, step = _decode(nodes, n, request, requests, after, np.minimum(1.0, capacity / after))
    tier, load = _load(nodes, n, request)
    exposed = load * nodes.exposed_share[:n]
    prefill = tokens * (
        nodes.prefill_per_token[:n] + tokens * nodes.prefill_per_token2[:n] + rank * nodes.prefill_per_token_rank[:n]
    )
    wait = _wait(nodes, n, request, after, capacity, step)
    promised = nodes.tightest_tpot[:n]
    return Terms(
        candidates=candidates,
        requests=requests,
        tier=tier,
        prefill=prefill,
        exposed=exposed,
        decode=decode,
        step=step,
        wait=wait,
        ttft=wait + nodes.prefill_base[:n] + prefill + exposed,
        tpot_limit=promised if request.tpot is None else np.minimum(promised, request.tpot),
        ttft_limit=np.inf if request.ttft is None else request.ttft,
        answer=answer,
    )


def _decode(
    nodes: NodeTable,
    n: int,
    request: PlacementRequest,
    requests: np.ndarray,
    after: np.ndarray,
    share: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """d_decode, and a step of the `share` of all requests that the node computes at once."""
    ranks = _ranks_added(nodes, n, request, requests, after)
    per_row, per_context, per_rank = nodes.decode_per_row[:n], nodes.decode_per_context[:n], nodes.decode_per_rank[:n]
    context = request.prompt_tokens + request.answer_tokens / 2  # on average over its answer
    contexts = nodes.contexts[:n] + nodes.prompt_tokens[:n] + context
    whole = after * per_row + contexts * per_context + (nodes.decode_ranks[:n] + ranks) * per_rank
    return per_row + context * per_context + ranks * per_rank, nodes.decode_base[:n] + share * whole


def _ranks_added(
    nodes: NodeTable, n: int, request: PlacementRequest, requests: np.ndarray, after: np.ndarray
) -> np.ndarray:
    """R(there + request) - R(there), by each node's rank term (cluster.performance_model)."""
    kind, largest, rank = nodes.rank_term[:n], nodes.max_rank[:n], request.rank
    padded = after * np.maximum(largest, rank) - requests * largest
    added = np.where(kind == MAX_RANK, padded, float(rank))
    users = nodes.users(request.digest) if request.digest else ()
    if users:  # their batches have the adapter's rank already
        there = np.zeros(nodes.live.size, np.bool_)
        there[np.fromiter(users, np.int64, len(users))] = True
        added[there[:n] & (kind == ADAPTER_RANKS)] = 0.0
    return added


def _load(nodes: NodeTable, n: int, request: PlacementRequest) -> tuple[np.ndarray, np.ndarray]:
    """Tiers i64[n], and f64[n] seconds until the adapter would be on the device, behind what is on its link already."""
    if request.digest is None:
        return np.full(n, DEVICE), np.zeros(n)
    tier, held = np.full(n, ABSENT), nodes.tiers(request.digest)
    if held:
        rows, levels = (np.fromiter(values, np.int64, len(held)) for values in (held.keys(), held.values()))
        known = rows < n
        tier[rows[known]] = levels[known]
    to_device = (
        nodes.device_latency[:n] + (nodes.loading_bytes[:n] + request.adapter_bytes) / nodes.device_bandwidth[:n]
    )
    from_store = nodes.store_latency[:n] + request.adapter_bytes / nodes.store_bandwidth[:n]
    # Chosen, not multiplied by 0: that would make NaN of a link without bandwidth.
    return tier, np.where(tier >= HOST, to_device + np.where(tier >= DISK, from_store, 0.0), 0.0)


def _wait(
    nodes: NodeTable, n: int, request: PlacementRequest, after: np.ndarray, capacity: np.ndarray, step: np.ndarray
) -> np.ndarray:
    """Until the prompt is begun: the prompts before it, and then whichever takes longer, a row or KV memory."""
    waiting = nodes.prompt_tokens[:n]
    busy = waiting * nodes.prefill_per_token[:n] + nodes.token_ranks[:n] * nodes.prefill_per_token_rank[:n]
    prompts = np.where(waiting > 0, nodes.prefill_base[:n] + busy, 0.0)
    over = after - capacity
    need = nodes.kv_promised[:n] + request.prompt_tokens + request.max_tokens
    short = need - nodes.kv_tokens_free[:n]
    if over.max() <= 0 and short.max() <= 0:
        return prompts
    # A row, and its memory, come free whenever one of those that run has its answer.
    answer = (request.typical_tokens or request.answer_tokens) * step
    row = np.where(over > 0, over * answer / capacity, 0.0)
    held = np.maximum(nodes.kv_tokens[:n] - nodes.kv_tokens_free[:n], 1)
    memory = np.where((short > 0) & (nodes.kv_tokens[:n] > 0), answer * short / held, 0.0)
    return prompts + np.maximum(row, memory)
