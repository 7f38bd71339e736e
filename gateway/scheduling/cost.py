"""What a request would cost on each node, and how it would fare there: the terms that policies decide by.

Toppings' Algorithm 1 weighs what a request adds to prefill and decode:

    d_prefill = prefill(waiting + request) - prefill(waiting)
    d_decode = decode(there + request) - decode(there)

by the node's own performance model. Added here: what the request would wait for its adapter, for the prompts before it,
for a row and for KV memory, so that its first token and its steps can be forecast. Every term is a column over the
candidates; the only loop is over the nodes that hold the adapter.
"""

from __future__ import annotations

from functools import cached_property
from typing import get_args

import msgspec
import numpy as np

from cluster.node_load import MARGIN
from cluster.node_table import ABSENT, DEVICE, DISK, HOST, LINEAR, LINEAR_BY_COST, NodeTable
from cluster.performance_model import RankTerm
from gateway.scheduling.request import PlacementRequest

MAX_RANK, ADAPTER_RANKS = (get_args(RankTerm).index(name) for name in ("max_rank", "adapter_ranks"))
"""As the column `rank_term` has them."""
PREFILL, DECODE, TRANSFER, FETCH = (
    slice(LINEAR.index(names[0]), LINEAR.index(names[-1]) + 1) for names in LINEAR_BY_COST.values()
)
"""Of LINEAR."""


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
    inverse: float
    """the mean of 1 / tokens"""

    @cached_property
    def strain(self) -> np.ndarray:
        """How much of its promise the worse of the two forecasts uses up: above 1 it breaks it, and NaN counts so."""
        strain: np.ndarray = np.maximum(self.step / self.tpot_limit, self.ttft / self.ttft_limit)
        return strain


def terms(nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Terms:
    """`candidates` i64[C], ascending, C >= 1. Odd numbers in `nodes` make odd terms, and numpy's warnings."""
    # Slices cost nothing and picking rows does: everything is computed for all rows.
    made = _terms(nodes, candidates, request)
    if nodes.height == candidates.size:
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
        + nodes.decode_per_row[rows] * np.clip(1.0 - nodes.decode_flat_rows[rows], 0.0, 1.0)
        + context * nodes.decode_per_context[rows]
        + rank * nodes.decode_per_rank[rows]
    )
    ahead = (nodes.device_wait[rows] - nodes.device_latency[rows]) * nodes.exposed_share[rows]
    exposed = np.where(made.tier == DEVICE, 0.0, made.exposed - ahead)
    ttft = nodes.prefill_base[rows] + made.prefill + exposed
    kept: np.ndarray = (ttft <= made.ttft_limit) & (step <= (np.inf if request.tpot is None else request.tpot))
    return kept


def _terms(nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Terms:
    n = nodes.height
    after = nodes.requests[:n] + 1.0
    prefill, decode, transfer, fetch = _weights(request) @ nodes.linear[:, :n]
    _correct_ranks(nodes, request, after, decode)
    tier, exposed = _load(nodes, request, transfer, fetch)
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
        answer=request.answer_tokens,
        inverse=request.inverse_tokens,
    )


def _weights(request: PlacementRequest) -> np.ndarray:
    """f64[4, LINEAR]: d_prefill, d_decode (as if its rank were simply added), the transfer from host memory to the
    device, and the fetch to host memory are these times a node's linear costs."""
    tokens, rank, size = float(request.prompt_tokens), float(request.rank), float(request.adapter_bytes)
    context = tokens + request.answer_tokens / 2  # on average over its answer
    weights = np.zeros((len(LINEAR_BY_COST), len(LINEAR)))
    weights[0, PREFILL] = tokens, tokens * tokens, tokens * rank
    weights[1, DECODE] = 1.0, context, rank
    weights[2, TRANSFER] = 1.0, size
    weights[3, FETCH] = 1.0, size
    return weights


def _correct_ranks(nodes: NodeTable, request: PlacementRequest, after: np.ndarray, decode: np.ndarray) -> None:
    """Changes `decode` where R(there + request) - R(there) is not the request's rank (cluster.performance_model)."""
    n, rank = decode.size, float(request.rank)
    if nodes.padding:
        padded = after * np.maximum(nodes.max_rank[:n], rank) - nodes.decode_ranks[:n] - rank
        decode += np.where(nodes.rank_term[:n] == MAX_RANK, padded, 0.0) * nodes.decode_per_rank[:n]
    users = nodes.users(request.digest) if request.digest else ()
    if users:  # their batches have the adapter's rank already
        rows = np.fromiter(users, np.int64, len(users))
        rows = rows[nodes.rank_term[rows] == ADAPTER_RANKS]
        decode[rows] -= rank * nodes.decode_per_rank[rows]


def _load(
    nodes: NodeTable, request: PlacementRequest, transfer: np.ndarray, fetch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tiers i64[n]; f64[n] seconds that the first token waits for the adapter, and for what must come before it."""
    n = transfer.size
    if request.digest is None:
        transfer[:] = 0.0
        return np.full(n, DEVICE), np.zeros(n)
    tiers, load, held = np.full(n, ABSENT), transfer + fetch, nodes.tiers(request.digest)
    if held:
        rows, levels = (np.fromiter(values, np.int64, len(held)) for values in (held.keys(), held.values()))
        tiers[rows] = levels
        near = np.where(levels == HOST, transfer[rows], 0.0)
        load[rows] = np.where(levels == DISK, load[rows], near)
    load *= nodes.exposed_share[:n]
    return tiers, load


def _step_and_wait(
    nodes: NodeTable, n: int, request: PlacementRequest, after: np.ndarray, decode: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A step with the request, and the time until its prompt is begun: the prompts before it, and then whichever takes
    longer, a row or KV memory."""
    step, capacity, rows_free = nodes.decode_there[:n] + decode, nodes.capacity[:n], nodes.rows_free[:n]
    base = nodes.decode_base[:n]
    computed: np.ndarray | float = 1.0
    if not rows_free.min() >= 1.0:  # rows beyond what the node computes at once wait: a step has no more than that
        computed = np.minimum(1.0, capacity / after)
        step = base + computed * (step - base)
    room, wait = nodes.kv_room[:n], nodes.prompt_wait[:n]
    if request.slo_class == "strict":
        rows_free = nodes.strict_rows[:n] - nodes.strict_ahead[:n]
        room, wait = nodes.strict_kv_room[:n], nodes.strict_prompt_wait[:n]
        if request.tpot is not None:  # best effort pauses, but no more than the tightest strict promise asks for
            least = np.maximum(step - computed * nodes.strict_saved[:n], base)
            planned = MARGIN * np.minimum(nodes.strict_tpot[:n], request.tpot)
            step = np.minimum(np.maximum(planned, least), step)
    need = request.prompt_tokens + request.max_tokens
    if not (rows_free.min() >= 1.0 and room.min() >= need):
        # A row, and its memory, come free whenever one of those that have them has its answer: a reserved place, too.
        over, short = 1.0 - rows_free, need - room
        answer = (request.typical_tokens or request.answer_tokens) * step
        row = np.where(over > 0, over * answer / capacity, 0.0)
        held = np.maximum(nodes.kv_tokens[:n] - np.maximum(room, 0.0), 1.0)
        memory = np.where(short > 0, answer * short / held, 0.0)
        wait = wait + np.maximum(row, memory)
    return step, wait
