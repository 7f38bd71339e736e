"""The columns of a score against the formula, computed node by node with the model's own functions."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from drawn_nodes import DEMANDS, REQUESTS, nodes
from hypothesis import given
from hypothesis import strategies as st
from scheduling_world import table_of

from cluster.node_table import ASSUMED, Demand
from cluster.performance_model import PerformanceModel
from gateway.scheduling.rank_aware import RankAware
from gateway.scheduling.request import RoutingRequest
from tests.support.listed_record import ListedRecord


def as_counted(rank: int, padded: int) -> int:
    return 0 if rank == 0 else max(rank, padded)


def ranks_term(model: PerformanceModel, ranks: list[int], distinct: int) -> int:
    if model.decode.rank_term == "max_rank":
        return len(ranks) * max(ranks, default=0)
    return sum(ranks) if model.decode.rank_term == "request_ranks" else distinct


def reference(record: ListedRecord, demands: list[Demand], request: RoutingRequest) -> tuple[float, float]:
    """(total, how near the nearest promise is to being broken, as a ratio)."""
    model, answer = record.performance or ASSUMED, request.expected_tokens or max(1.0, request.demand.max_tokens / 2)
    padded = model.decode.padded_rank
    rank = as_counted(request.demand.rank, padded)
    ranks = [*record.batch_ranks, *record.queued_ranks, *(demand.rank for demand in demands)]
    ranks = [as_counted(each, padded) for each in ranks]
    shared = request.digest is not None and any(entry.in_use for entry in record.residents)
    waiting = record.prompt_tokens_left + sum(demand.prompt_tokens for demand in demands)
    contexts, mine = sum(record.batch_contexts) + waiting, request.demand.prompt_tokens + answer / 2
    before = model.decode.seconds(len(ranks), contexts, ranks_term(model, ranks, sum(ranks)))
    then = ranks_term(model, [*ranks, rank], sum(ranks) + (0 if shared else rank))
    step = model.decode.seconds(len(ranks) + 1, contexts + mine, then)  # type: ignore[arg-type]
    d_decode = step - before
    tokens = request.demand.prompt_tokens
    d_prefill = model.prefill.seconds(
        waiting + tokens, tokens**2, tokens * as_counted(request.demand.rank, model.prefill.padded_rank)
    )
    d_prefill -= model.prefill.seconds(waiting, 0, 0)
    exposed, tier, size = 0.0, "device", float(request.adapter_bytes)
    if record.adapter_itemsize and request.adapter_itemsize:
        size *= record.adapter_itemsize / request.adapter_itemsize
    if request.digest is not None:
        tier = record.residents[0].tier if record.residents else "absent"
        if tier != "device":
            exposed += model.to_device.seconds(size + record.loading_bytes)
        if tier in ("disk", "absent"):
            exposed += model.from_store.seconds(request.adapter_bytes)
        exposed *= model.exposed_share
    computed = min(1.0, record.max_rows / (len(ranks) + 1)) if record.max_rows else 1.0
    step = model.decode.base + (step - model.decode.base) * computed
    if request.demand.slo_class == "strict" and record.strict is not None and request.demand.tpot is not None:
        away = min(record.strict.paused_rows, max(0, record.running - model.decode.flat_rows))
        saved = away * model.decode.per_row + record.strict.paused_contexts * model.decode.per_context
        theirs = [record.strict.tightest_tpot, *(demand.tpot for demand in demands if demand.slo_class == "strict")]
        kept = [tpot for tpot in theirs if tpot is not None and tpot >= model.decode.seconds(1, 0, 0)]
        step = min(step, max(0.8 * min([*kept, request.demand.tpot]), step - saved * computed, model.decode.base))
    queue = _queue(record, demands, request, model, step, answer)
    first = queue + model.prefill.base + d_prefill + exposed
    own = first * (request.expected_inverse or 1 / answer) + step
    copy = 0.0 if tier == "device" else model.to_device.seconds(size + record.loading_bytes)
    total = own + len(ranks) * (d_prefill / answer + d_decode) + (len(ranks) + 1) * copy / answer
    least = model.decode.seconds(1, 0, 0)
    others = [record.tightest_tpot, *(demand.tpot for demand in demands)]
    promises = [request.demand.tpot, *(promise for promise in others if promise is not None and promise >= least)]
    ratios = [step / promise for promise in promises if promise is not None]
    if request.ttft is not None:
        ratios.append(first / request.ttft)
    return total, max(ratios, default=0.0)


def _queue(
    record: ListedRecord,
    demands: list[Demand],
    request: RoutingRequest,
    model: PerformanceModel,
    step: float,
    answer: float,
) -> float:
    free, all_tokens = record.kv_blocks_free * record.block_tokens, record.kv_blocks * record.block_tokens
    ahead, room, rows = record.running + record.queued, free, record.max_rows
    before, waiting = demands, record.prompt_tokens_left
    if request.demand.slo_class == "strict" and record.strict is not None:
        told = record.strict
        ahead, room, rows, waiting = told.queued, told.blocks * record.block_tokens, told.rows, told.prompt_tokens
        demands = [demand for demand in demands if demand.slo_class != "best_effort"]
        before = [demand for demand in demands if demand.slo_class == "strict"]
    waiting += sum(demand.prompt_tokens for demand in before)
    prompts = model.prefill.per_token * waiting
    padded = model.prefill.padded_rank
    ranks = sum(demand.prompt_tokens * as_counted(demand.rank, padded) for demand in before)
    prompts += model.prefill.per_token_rank * ranks
    if request.demand.slo_class == "strict" and prompts > 0:
        prompts += model.prefill.base
    others = (request.typical_tokens or answer) * step
    over = ahead + len(demands) + 1 - rows
    row = over * others / record.max_rows if record.max_rows and over > 0 else 0.0
    room -= sum(demand.prompt_tokens + demand.max_tokens for demand in demands)
    held, need = max(all_tokens - max(room, 0), 1), request.demand.prompt_tokens + request.demand.max_tokens
    memory = (need - room) * others / held if need > room and all_tokens else 0.0
    return prompts + max(row, memory)


@given(st.lists(st.tuples(nodes(), st.lists(DEMANDS, max_size=3)), min_size=1, max_size=5), REQUESTS, st.data())
def test_every_total_is_the_formulas(
    drawn: list[tuple[ListedRecord, list[Demand]]], request: RoutingRequest, data: st.DataObject
) -> None:
    records = [msgspec.structs.replace(record, id=str(index)) for index, (record, _) in enumerate(drawn)]
    table = table_of(*records)
    for row, (_, demands) in enumerate(drawn):
        for index, demand in enumerate(demands):
            table.reserve(row, str(index), demand)
    rows = sorted(data.draw(st.sets(st.integers(0, len(drawn) - 1), min_size=1)))
    policy = RankAware()
    row = policy.choose(table, np.array(rows), request)
    scores = policy.last
    assert scores is not None
    wanted = [reference(records[at], drawn[at][1], request) for at in rows]
    for found, (total, strain) in zip(scores.totals.tolist(), wanted, strict=True):
        if abs(strain - 1) < 1e-6:
            continue  # which side of a promise rounding falls on
        if strain > 1:
            assert found == math.inf
        else:
            assert math.isclose(found, total, rel_tol=1e-6, abs_tol=1e-9)
    if row is None:
        assert request.demand.slo_class == "strict" and np.isinf(scores.totals).all()
        return
    clear = all(abs(strain - 1) >= 1e-6 for _, strain in wanted)
    finite = [total for total, strain in wanted if strain < 1]
    mine = wanted[rows.index(row)]
    if clear and finite:
        assert mine[1] < 1 and mine[0] <= min(finite) * (1 + 1e-6) + 1e-9
    elif clear:
        assert mine[1] <= min(strain for _, strain in wanted) * (1 + 1e-6)
