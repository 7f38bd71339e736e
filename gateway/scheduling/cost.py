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
    """running, waiting and reserved, and this one"""
    tier: np.ndarray
    """i64[C]: DEVICE, HOST, DISK or ABSENT; DEVICE for the base alone"""
    prefill: np.ndarray
    """d_prefill: what the prompt adds to the prompts that wait"""
    transfer: np.ndarray
    """of the adapter from host memory to the device, behind what is on the link"""
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
    """`candidates` i64[C], ascending, C >= 1. Odd numbers in `nodes` make odd terms, and numpy's warnings."""
    # Slices cost nothing and picking rows does: everything is computed for all rows up to the last candidate.
    n = int(candidates[-1]) + 1
    made = _terms(nodes, candidates, n, request)
    if n == candidates.size:
        return made
    for name in Terms.__struct_fields__[1:]:
        column = getattr(made, name)
        if isinstance(column, np.ndarray):
            setattr(made, name, column[candidates])
    return made


def attainable(nodes: NodeTable, made: Terms, request: PlacementRequest) -> np.ndarray:
    """bool[C]: the node could keep what the request was promised if it had nothing else to do. Where none could,
    waiting is in vain."""
    rows, rank = made.candidates, float(request.rank)
    context = request.prompt_tokens + request.answer_tokens / 2
    step = (
        nodes.decode_base[rows]
        + nodes.decode_per_row[rows]
        + context * nodes.decode_per_context[rows]
        + rank * nodes.decode_per_rank[rows]
    )
    ahead = (nodes.device_wait[rows] - nodes.device_latency[rows]) * nodes.exposed_share[rows]
    exposed = np.where(made.tier == DEVICE, 0.0, made.exposed - ahead)
    ttft = nodes.prefill_base[rows] + made.prefill + exposed
    kept: np.ndarray = (ttft <= made.ttft_limit) & (step <= (np.inf if request.tpot is None else request.tpot))
    return kept


def _terms(nodes: NodeTable, candidates: np.ndarray, n: int, request: PlacementRequest) -> Terms:
    tokens, answer, after = float(request.prompt_tokens), request.answer_tokens, nodes.requests[:n] + 1.0
    tier, transfer, exposed = _load(nodes, n, request)
    prefill = (
        tokens * nodes.prefill_per_token[:n]
        + tokens * tokens * nodes.prefill_per_token2[:n]
        + tokens * request.rank * nodes.prefill_per_token_rank[:n]
    )
    context = tokens + answer / 2  # on average over its answer
    decode = (
        nodes.decode_per_row[:n]
        + context * nodes.decode_per_context[:n]
        + _ranks_added(nodes, n, request, after) * nodes.decode_per_rank[:n]
    )
    step, wait = _step_and_wait(nodes, n, request, after, decode)
    promised = nodes.tightest_tpot[:n]
    return Terms(
        candidates=candidates,
        requests=after,
        tier=tier,
        prefill=prefill,
        transfer=transfer,
        exposed=exposed,
        decode=decode,
        step=step,
        wait=wait,
        ttft=wait + nodes.prefill_base[:n] + prefill + exposed,
        tpot_limit=promised if request.tpot is None else np.minimum(promised, request.tpot),
        ttft_limit=np.inf if request.ttft is None else request.ttft,
        answer=answer,
    )


def _ranks_added(nodes: NodeTable, n: int, request: PlacementRequest, after: np.ndarray) -> np.ndarray:
    """R(there + request) - R(there), by each node's rank term (cluster.performance_model)."""
    kind, rank = nodes.rank_term[:n], float(request.rank)
    padded = after * np.maximum(nodes.max_rank[:n], rank) - nodes.decode_ranks[:n]
    added = np.where(kind == MAX_RANK, padded, rank)
    users = nodes.users(request.digest) if request.digest else ()
    if users:  # their batches have the adapter's rank already
        there = np.zeros(nodes.live.size, np.bool_)
        there[np.fromiter(users, np.int64, len(users))] = True
        added[there[:n] & (kind == ADAPTER_RANKS)] = 0.0
    return added


def _load(nodes: NodeTable, n: int, request: PlacementRequest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiers i64[n]; f64[n] seconds of the transfer to the device; f64[n] what the first token waits for it, and for
    what must come before it."""
    if request.digest is None:
        return np.full(n, DEVICE), np.zeros(n), np.zeros(n)
    size, held = float(request.adapter_bytes), nodes.tiers(request.digest)
    transfer = nodes.device_wait[:n] + size * nodes.device_per_byte[:n]
    load = transfer + nodes.store_latency[:n] + size * nodes.store_per_byte[:n]
    tiers = np.full(nodes.live.size, ABSENT)
    if held:
        rows, levels = (np.fromiter(values, np.int64, len(held)) for values in (held.keys(), held.values()))
        tiers[rows] = levels
        # Chosen, not multiplied by 0: that would make NaN of an infinite load.
        load = np.where(tiers[:n] >= DISK, load, np.where(tiers[:n] == HOST, transfer, 0.0))
    return tiers[:n], transfer, load * nodes.exposed_share[:n]


def _step_and_wait(
    nodes: NodeTable, n: int, request: PlacementRequest, after: np.ndarray, decode: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A step with the request, and the time until its prompt is begun: the prompts before it, and then whichever takes
    longer, a row or KV memory."""
    step, capacity = nodes.decode_there[:n] + decode, nodes.capacity[:n]
    beyond = after - capacity
    if beyond.max() > 0:  # rows beyond what the node computes at once wait: a step has no more than that
        base = nodes.decode_base[:n]
        step = base + np.minimum(1.0, capacity / after) * (step - base)
    if request.slo_class == "strict":
        over, room = nodes.strict_ahead[:n] + 1.0 - nodes.strict_rows[:n], nodes.strict_kv_room[:n]
        wait = nodes.strict_prompt_wait[:n]
    else:
        over, room, wait = beyond, nodes.kv_room[:n], nodes.prompt_wait[:n]
    short = request.prompt_tokens + request.max_tokens - room
    if over.max() > 0 or short.max() > 0:
        # A row, and its memory, come free whenever one of those that run has its answer.
        answer = (request.typical_tokens or request.answer_tokens) * step
        row = np.where(over > 0, over * answer / capacity, 0.0)
        held = np.maximum(nodes.kv_tokens[:n] - nodes.kv_tokens_free[:n], 1)
        memory = np.where(short > 0, answer * short / held, 0.0)
        wait = wait + np.maximum(row, memory)
    return step, wait
