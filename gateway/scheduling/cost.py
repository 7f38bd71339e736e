"""Cost model: the time that a request would add to each node's other requests, and the request's own forecast times
there. Policies decide by these costs.

Toppings' Algorithm 1 weighs what a request adds to prefill and decode:

    d_prefill = prefill(waiting + request) - prefill(waiting)
    d_decode = decode(there + request) - decode(there)

by the node's own performance model. This model adds the waits for the adapter, for the prompts ahead, for a row and for
KV memory, so that the first token and the decode steps can be forecast. Each term is an array over the candidates; the
only loop is over the nodes that hold the adapter.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import get_args

import msgspec
import numpy as np

from cluster.node_load import MARGIN
from cluster.node_table import ABSENT, DEVICE, DISK, HOST, STANDARD, STRICT, NodeTable
from cluster.performance_model import RankTerm, counted_rank
from gateway.scheduling.request import RoutingRequest

MAX_RANK, ADAPTER_RANKS = (get_args(RankTerm).index(name) for name in ("max_rank", "adapter_ranks"))
"""Values of the node table's column `rank_term`: indices of `max_rank` and `adapter_ranks` in RankTerm."""


class Terms(msgspec.Struct, dict=True):
    """Cost terms of the C candidates. Arrays are f64[C] in seconds unless a note says otherwise."""

    candidates: np.ndarray
    """i64[C]: rows of the node table."""
    requests: np.ndarray
    """f64[C]: number of requests on the node (running, waiting and reserved), including this one."""
    tier: np.ndarray
    """i64[C]: fastest tier that holds the adapter (DEVICE, HOST, DISK or ABSENT). DEVICE for the base model alone."""
    prefill: np.ndarray
    spreading: np.ndarray
    """Time to reload what one more copy of the adapter displaces; 0 where the adapter is on the device.

    It is estimated as the adapter's own transfer from host memory, including the wait for transfers already queued.
    """
    exposed: np.ndarray
    """Time for which the first token waits for the adapter to load."""
    decode: np.ndarray
    """d_decode: time that the request adds to each decode step."""
    step: np.ndarray
    wait: np.ndarray
    """Time before the request's prefill starts: the wait for other prompts, then for a row or for KV memory."""
    ttft: np.ndarray
    tpot_limit: np.ndarray
    """Tightest TPOT target of this request and the requests on the node; infinite if none has a target."""
    ttft_limit: float
    answer: float
    inverse: float

    @cached_property
    def strain(self) -> np.ndarray:
        """Returns f64[C]: the larger of the ratios forecast / limit for the step and for TTFT.

        A value above 1, or NaN, means that an SLO would be violated.
        """
        strain: np.ndarray = np.maximum(self.step / self.tpot_limit, self.ttft / self.ttft_limit)
        return strain


class Scores(msgspec.Struct, gc=False):
    """Scores that a policy gives the C candidates. Arrays are indexed as in Terms."""

    terms: Terms
    totals: np.ndarray
    """f64[C]: total cost; the lowest wins. Infinite where an SLO would be violated."""
    widened: np.ndarray
    """bool[C]: True for a node whose forecasts are unreliable and therefore refuse no request."""
    retry_after: float = 0.0


class ScoringPolicy:
    """Base class of policies that keep the scores of their latest choice."""

    last: Scores | None = None
    """Scores of the latest choice. The next choice overwrites them, so read them before the next `await`."""


def terms(nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> Terms:
    """Returns the cost terms of a request on each candidate.

    `candidates`: i64[C], ascending rows, C >= 1. Invalid numbers in `nodes` lead to invalid terms and to warnings from
    numpy.
    """
    everybody = candidates[-1] == candidates.size - 1  # a slice is a view, while indexing by rows copies
    at = nodes.table[: candidates.size] if everybody else nodes.table[candidates]
    demand, after = request.demand, at["requests"] + 1.0
    tokens, rank = float(demand.prompt_tokens), float(demand.rank)
    counted = np.maximum(at["prefill_padded_rank"], rank) if rank else 0.0
    prefill = tokens * (
        at["prefill_per_token"] + tokens * at["prefill_per_token2"] + counted * at["prefill_per_token_rank"]
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


def attainable(nodes: NodeTable, costs: Terms, request: RoutingRequest) -> np.ndarray:
    """Returns bool[C]: whether an idle node would meet the request's SLO. If no node would, waiting does not help."""
    tokens, rank, tpot = request.demand.prompt_tokens, request.demand.rank, request.demand.tpot
    attained = np.zeros(costs.candidates.size, np.bool_)
    sizes = _on_device(request, nodes.adapter_itemsize[costs.candidates])
    rows = zip(costs.candidates.tolist(), costs.tier.tolist(), sizes.tolist(), strict=True)
    for index, (row, tier, size) in enumerate(rows):
        model = nodes.model(row)
        load = 0.0 if tier == DEVICE else model.to_device.seconds(size)
        load += model.from_store.seconds(request.adapter_bytes) if tier in (DISK, ABSENT) else 0.0
        of_prompt = counted_rank(rank, model.prefill.padded_rank)
        ttft = model.prefill.seconds(tokens, tokens * tokens, tokens * of_prompt) + load * model.exposed_share
        in_step = counted_rank(rank, model.decode.padded_rank)
        step = model.decode.seconds(1, tokens + request.answer_tokens / 2, in_step)
        attained[index] = ttft <= costs.ttft_limit and (tpot is None or step <= tpot)
    return attained


def _decode(nodes: NodeTable, candidates: np.ndarray, at: np.ndarray, request: RoutingRequest) -> np.ndarray:
    """Returns f64[C]: the seconds that the request adds to a decode step.

    These are the costs of one more row, of its rank, and of its context, averaged over its answer.
    """
    # R(there + request) - R(there) by the node's own rank term (cluster.performance_model).
    rank = float(request.demand.rank)
    ranks = np.maximum(at["decode_padded_rank"], rank) if rank else np.zeros(candidates.size)
    padded = at["rank_term"] == MAX_RANK
    if padded.any():  # all requests are padded to the largest rank
        largest = np.maximum(at["max_rank"], ranks)
        ranks = np.where(padded, largest + at["requests"] * (largest - at["max_rank"]), ranks)
    if request.digest and (users := nodes.users(request.digest)):  # their batches already have the adapter's rank
        index = _indices(candidates, users)
        ranks[index[at["rank_term"][index] == ADAPTER_RANKS]] = 0.0
    context = request.demand.prompt_tokens + request.answer_tokens / 2
    added: np.ndarray = at["decode_next_row"] + context * at["decode_per_context"] + ranks * at["decode_per_rank"]
    return added


def _load(
    nodes: NodeTable, candidates: np.ndarray, at: np.ndarray, request: RoutingRequest
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns three arrays about the adapter on each candidate: its tier, `spreading` and `exposed`, as in Terms."""
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


def _on_device(request: RoutingRequest, itemsize: np.ndarray) -> np.ndarray:
    """Returns f64[C]: the adapter's size in bytes with elements of `itemsize` (f64[C]) bytes.

    Where an element size is unknown (0), the size of the adapter's file is returned.
    """
    size, itemsize_in_file = float(request.adapter_bytes), request.adapter_itemsize
    if not itemsize_in_file:
        return np.full(itemsize.shape, size)
    return np.where(itemsize > 0, size / itemsize_in_file * itemsize, size)


def _indices(candidates: np.ndarray, rows: Collection[int]) -> np.ndarray:
    """Returns i64[N]: the indices in `candidates` of the N `rows` that are candidates."""
    wanted_rows = np.fromiter(rows, np.int64, len(rows))
    index = np.minimum(candidates.searchsorted(wanted_rows), candidates.size - 1)
    inside: np.ndarray = index[candidates[index] == wanted_rows]
    return inside


def _step_and_wait(
    at: np.ndarray, request: RoutingRequest, after: np.ndarray, decode: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `step` and `wait` as in Terms, both f64[C] in seconds.

    The wait is for the prompts ahead, then for a row or for KV memory, whichever takes longer.
    """
    demand, strict = request.demand, request.demand.slo_class == "strict"
    kind = STRICT if strict else STANDARD
    base, capacity = at["decode_base"], at["capacity"]
    # Requests beyond the node's maximum rows wait, so a step computes no more rows than that.
    computed = np.minimum(1.0, capacity / after)
    step = base + computed * (at["decode_there"] + decode - base)
    if strict and demand.tpot is not None:  # best effort pauses, but only as far as the tightest strict TPOT requires
        shortest = np.maximum(step - computed * at["strict_saved"], base)
        planned = MARGIN * np.minimum(at["tightest_tpot"][:, STRICT], demand.tpot)
        step = np.minimum(np.maximum(planned, shortest), step)
    # A row and its memory become free whenever one of the requests that hold them ends; the same holds for a place.
    answer = (request.typical_tokens or request.answer_tokens) * step
    room = at["kv_room"][:, kind]
    over, short = 1.0 - at["rows_free"][:, kind], demand.prompt_tokens + demand.max_tokens - room
    row = np.where(over > 0, over * answer / capacity, 0.0)
    tokens_in_use = np.maximum(at["kv_tokens"] - np.maximum(room, 0.0), 1.0)
    memory = np.where(short > 0, answer * short / tokens_in_use, 0.0)
    prompts = at["prompt_wait"][:, kind]
    if strict:  # conservative: the prompts may need a separate pass
        prompts = prompts + np.where(prompts > 0, at["prefill_base"], 0.0)
    return step, prompts + np.maximum(row, memory)
