"""Cost model: what a request would add to each node, and its forecast times there, by which policies decide.

Toppings' Algorithm 1 weighs what a request adds to prefill and decode:

    d_prefill = prefill(waiting + request) - prefill(waiting)
    d_decode = decode(there + request) - decode(there)

by the node's own performance model. Added here: what the request would wait for its adapter, for the prompts before it,
for a row and for KV memory, so that its first token and its steps can be forecast. Every term is a column over the
candidates; the only loop is over the nodes that hold the adapter.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import get_args

import msgspec
import numpy as np

from cluster.node_load import MARGIN
from cluster.node_table import ABSENT, DEVICE, DISK, HOST, STANDARD, STRICT, NodeTable
from cluster.performance_model import RankTerm
from gateway.scheduling.request import PlacementRequest

MAX_RANK, ADAPTER_RANKS = (get_args(RankTerm).index(name) for name in ("max_rank", "adapter_ranks"))
"""Codes of rank terms in the column `rank_term`."""


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
    spreading: np.ndarray
    """what one more copy displaces, and must be loaded again: as long as the adapter's own transfer from host memory,
    behind what is on the link; 0 where it is on the device"""
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
    """tightest TPOT target of the requests there and this one; infinite without any"""
    ttft_limit: float
    answer: float
    """tokens that its answer will have, as expected"""
    inverse: float
    """the mean of 1 / tokens"""

    @cached_property
    def strain(self) -> np.ndarray:
        """The larger of forecast / limit for step and TTFT: above 1 an SLO is broken, as with NaN."""
        strain: np.ndarray = np.maximum(self.step / self.tpot_limit, self.ttft / self.ttft_limit)
        return strain


class Scores(msgspec.Struct, gc=False):
    """A policy's scores of the candidates; columns as in Terms."""

    terms: Terms
    totals: np.ndarray
    """Total cost, of which the least wins; infinite where an SLO would be broken."""
    widened: np.ndarray
    """bool[C]: what is forecast of the node refuses nobody"""
    retry_after: float = 0.0
    """Seconds until a refused request may find a place, as forecast."""


class ScoringPolicy:
    """A policy that keeps the scores by which it chose."""

    last: Scores | None = None
    """Scores of the latest choice, to be read before anything else can run."""


def terms(nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Terms:
    """`candidates` i64[C], ascending, C >= 1. Odd numbers in `nodes` make odd terms, and numpy's warnings."""
    everybody = candidates[-1] == candidates.size - 1  # a slice costs nothing, and picking rows does
    at = nodes.table[: candidates.size] if everybody else nodes.table[candidates]
    demand, after = request.demand, at["requests"] + 1.0
    tokens, rank = float(demand.prompt_tokens), float(demand.rank)
    prefill = tokens * (
        at["prefill_per_token"] + tokens * at["prefill_per_token2"] + rank * at["prefill_per_token_rank"]
    )
    decode = _decode(nodes, candidates, at, request)
    tier, spreading, exposed = _load(nodes, candidates, at, request)
    step, wait = _step_and_wait(at, request, after, decode)
    promised = at["tightest_tpot"][:, STANDARD]
    return Terms(
        candidates=candidates,
        requests=after,
        tier=tier,
        prefill=prefill,
        spreading=spreading,
        exposed=exposed,
        decode=decode,
        step=step,
        wait=wait,
        ttft=wait + at["prefill_base"] + prefill + exposed,
        tpot_limit=promised if demand.tpot is None else np.minimum(promised, demand.tpot),
        ttft_limit=np.inf if request.ttft is None else request.ttft,
        answer=request.answer_tokens,
        inverse=request.inverse_tokens,
    )


def attainable(nodes: NodeTable, costs: Terms, request: PlacementRequest) -> np.ndarray:
    """Returns bool[C]: whether the node would attain the request's SLO if it were idle. Where none would, waiting does
    not help."""
    tokens, rank, tpot = request.demand.prompt_tokens, request.demand.rank, request.demand.tpot
    attained = np.zeros(costs.candidates.size, np.bool_)
    sizes = _on_device(request, nodes.adapter_itemsize[costs.candidates])
    rows = zip(costs.candidates.tolist(), costs.tier.tolist(), sizes.tolist(), strict=True)
    for index, (row, tier, size) in enumerate(rows):
        model = nodes.model(row)
        load = 0.0 if tier == DEVICE else model.to_device.seconds(size)
        load += model.from_store.seconds(request.adapter_bytes) if tier in (DISK, ABSENT) else 0.0
        ttft = model.prefill.seconds(tokens, tokens * tokens, tokens * rank) + load * model.exposed_share
        step = model.decode.seconds(1, tokens + request.answer_tokens / 2, rank)
        attained[index] = ttft <= costs.ttft_limit and (tpot is None or step <= tpot)
    return attained


def _decode(nodes: NodeTable, candidates: np.ndarray, at: np.ndarray, request: PlacementRequest) -> np.ndarray:
    """Returns f64[C]: the seconds that one more row, its context (on average over its answer) and its rank add to a
    step."""
    # R(there + request) - R(there) by the node's own rank term (cluster.performance_model).
    ranks = np.full(candidates.size, float(request.demand.rank))
    padded = at["rank_term"] == MAX_RANK
    if padded.any():  # everybody is computed as the largest one
        largest = np.maximum(at["max_rank"], ranks)
        ranks = np.where(padded, largest + at["requests"] * (largest - at["max_rank"]), ranks)
    if request.digest and (users := nodes.users(request.digest)):  # their batches have the adapter's rank already
        index = _indices(candidates, users)
        ranks[index[at["rank_term"][index] == ADAPTER_RANKS]] = 0.0
    context = request.demand.prompt_tokens + request.answer_tokens / 2
    added: np.ndarray = at["decode_next_row"] + context * at["decode_per_context"] + ranks * at["decode_per_rank"]
    return added


def _load(
    nodes: NodeTable, candidates: np.ndarray, at: np.ndarray, request: PlacementRequest
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiers i64[C]; what a copy displaces; what the first token waits for the adapter, and for what must come before it
    on its way."""
    n = candidates.size
    if request.digest is None:
        return np.full(n, DEVICE), np.zeros(n), np.zeros(n)
    tier, tiers = np.full(n, ABSENT), nodes.tiers(request.digest)
    if tiers:
        index = _indices(candidates, tiers)
        tier[index] = [tiers[row] for row in candidates[index].tolist()]
    transfer = at["device_wait"] + _on_device(request, at["adapter_itemsize"]) * at["device_per_byte"]
    far = transfer + at["store_latency"] + float(request.adapter_bytes) * at["store_per_byte"]
    load = np.where(tier == HOST, transfer, far)
    cold = tier != DEVICE
    return tier, np.where(cold, transfer, 0.0), np.where(cold, load * at["exposed_share"], 0.0)


def _on_device(request: PlacementRequest, itemsize: np.ndarray) -> np.ndarray:
    """Returns f64[C]: the bytes of the adapter where an element has `itemsize` (f64[C]) of them; as it is in its file
    where either size of an element is not known (0)."""
    size, itemsize_in_file = float(request.adapter_bytes), request.adapter_itemsize
    if not itemsize_in_file:
        return np.full(itemsize.shape, size)
    return np.where(itemsize > 0, size / itemsize_in_file * itemsize, size)


def _indices(candidates: np.ndarray, rows: Collection[int]) -> np.ndarray:
    """i64: where in `candidates` those of `rows` are that are among them."""
    wanted_rows = np.fromiter(rows, np.int64, len(rows))
    index = np.minimum(candidates.searchsorted(wanted_rows), candidates.size - 1)
    inside: np.ndarray = index[candidates[index] == wanted_rows]
    return inside


def _step_and_wait(
    at: np.ndarray, request: PlacementRequest, after: np.ndarray, decode: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A step with the request, and the time until its prompt is begun: the prompts before it, and then whichever takes
    longer, a row or KV memory."""
    demand, strict = request.demand, request.demand.slo_class == "strict"
    kind = STRICT if strict else STANDARD
    base, capacity = at["decode_base"], at["capacity"]
    # Rows beyond what the node computes at once wait: a step has no more than that.
    computed = np.minimum(1.0, capacity / after)
    step = base + computed * (at["decode_there"] + decode - base)
    if strict and demand.tpot is not None:  # best effort pauses, but no more than the tightest strict promise asks for
        shortest = np.maximum(step - computed * at["strict_saved"], base)
        planned = MARGIN * np.minimum(at["tightest_tpot"][:, STRICT], demand.tpot)
        step = np.minimum(np.maximum(planned, shortest), step)
    # A row, and its memory, come free whenever one of those that have them has its answer: a reserved place, too.
    answer = (request.typical_tokens or request.answer_tokens) * step
    room = at["kv_room"][:, kind]
    over, short = 1.0 - at["rows_free"][:, kind], demand.prompt_tokens + demand.max_tokens - room
    row = np.where(over > 0, over * answer / capacity, 0.0)
    tokens_in_use = np.maximum(at["kv_tokens"] - np.maximum(room, 0.0), 1.0)
    memory = np.where(short > 0, answer * short / tokens_in_use, 0.0)
    prompts = at["prompt_wait"][:, kind]
    if strict:  # counts on no luck: they may have a pass of their own
        prompts = prompts + np.where(prompts > 0, at["prefill_base"], 0.0)
    return step, prompts + np.maximum(row, memory)
