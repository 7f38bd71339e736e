"""Forecasts of a node are its own: whoever else is in the table or was, and whichever nodes are candidates."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from drawn_nodes import DEMANDS, REQUESTS, nodes
from hypothesis import assume, given
from hypothesis import strategies as st
from scheduling_world import MEASURED, ask, chosen, node, table_of

from cluster.news import Resident, StrictRoom
from cluster.node_table import STANDARD, Demand, NodeTable
from gateway.scheduling.cost import Terms, attainable, terms
from gateway.scheduling.rank_aware import RETRY_BOUNDS, RankAware
from gateway.scheduling.request import RoutingRequest
from tests.support.listed_record import ListedRecord, put_record

CROWDS = st.lists(st.tuples(nodes(), st.lists(DEMANDS, max_size=2)), min_size=2, max_size=5)
COLUMNS = [name for name in Terms.__struct_fields__[1:] if name not in ("ttft_limit", "answer", "inverse")]


def put(table: NodeTable, record: ListedRecord, demands: list[Demand]) -> int:
    row = put_record(table, record)
    for index, demand in enumerate(demands):
        table.reserve(row, str(index), demand)
    return row


def forecast(table: NodeTable, rows: np.ndarray, request: RoutingRequest) -> tuple[Terms, np.ndarray]:
    """The terms, and where the promise is attainable. Policies, too, ignore what rows without a node make numpy say."""
    with np.errstate(all="ignore"):
        made = terms(table, rows, request)
        return made, attainable(table, made, request)


@given(CROWDS, st.lists(nodes(), max_size=5), REQUESTS, st.data())
def test_a_forecast_is_of_its_node_alone(
    drawn: list[tuple[ListedRecord, list[Demand]]],
    before: list[ListedRecord],
    request: RoutingRequest,
    data: st.DataObject,
) -> None:
    """Rows had other nodes before, nodes had another epoch and model, some have gone, and not all are candidates."""
    table = NodeTable(8)
    for index, record in enumerate(before):
        name = data.draw(st.sampled_from(["gone", str(index)]))
        put(table, msgspec.structs.replace(record, id=name, epoch="0"), drawn[0][1])
    table.remove("gone")
    for index, (record, demands) in enumerate(drawn):
        put(table, msgspec.structs.replace(record, id=str(index)), demands)
    left = data.draw(st.none() | st.integers(0, len(drawn) - 1))
    if left is not None:
        table.remove(str(left))
    names = [name for name in data.draw(st.permutations(range(len(drawn)))) if name != left]
    found = {table.row(str(name)): name for name in names[: data.draw(st.integers(1, len(names)))]}
    rows = np.array(sorted(row for row in found if row is not None))
    made, possible = forecast(table, rows, request)
    for index, row in enumerate(rows.tolist()):
        alone = NodeTable(1)
        put(alone, *drawn[found[row]])
        own, possible_alone = forecast(alone, np.array([0]), request)
        for name in COLUMNS:
            assert getattr(made, name)[index] == pytest.approx(getattr(own, name)[0], rel=1e-9, abs=1e-12), name
        assert possible[index] == possible_alone[0]


@given(nodes(), st.lists(DEMANDS, max_size=2), REQUESTS, st.sampled_from([0.5, 0.9999, 1.0001, 2.0]))
def test_what_is_attainable_is_what_the_node_would_do_if_it_had_nothing_to_do(
    record: ListedRecord, demands: list[Demand], request: RoutingRequest, share: float
) -> None:
    """Promises a little below and above what it would do then."""
    idle = table_of(
        msgspec.structs.replace(
            record,
            running=0, batch_ranks=[], batch_slots=[], batch_contexts=[], queued=0, queued_ranks=[],
            prompt_tokens_left=0, loading_bytes=0, kv_blocks_free=0, kv_blocks=0, strict=None,
            residents=[msgspec.structs.replace(each, in_use=0) for each in record.residents],
        )
    )  # fmt: skip
    alone, table = forecast(idle, np.array([0]), request)[0], NodeTable(1)
    put(table, record, demands)
    assume(alone.ttft[0] > 1e-6)
    for ttft, tpot in ((share, None), (2.0, share), (share, 2.0), (None, share), (None, None)):
        step = None if tpot is None else tpot * float(alone.step[0])
        promised = msgspec.structs.replace(
            request,
            demand=msgspec.structs.replace(request.demand, tpot=step),
            ttft=None if ttft is None else ttft * float(alone.ttft[0]),
        )
        kept = all(each is None or each > 1 for each in (ttft, tpot))
        assert forecast(table, np.array([0]), promised)[1][0] == kept


def test_an_adapter_in_use_adds_no_rank_where_distinct_ones_count() -> None:
    models = {
        term: msgspec.structs.replace(MEASURED, decode=msgspec.structs.replace(MEASURED.decode, rank_term=term))
        for term in ("adapter_ranks", "request_ranks")
    }
    used, unused = ([Resident("d", "device", 1, leases)] for leases in (1, 0))
    nodes = table_of(
        node("shared", 16, residents=used, performance=models["adapter_ranks"]),
        node("apart", 16, residents=unused, performance=models["adapter_ranks"]),
        node("each", 16, residents=used, performance=models["request_ranks"]),
    )
    decode, rank = terms(nodes, np.arange(3), ask()).decode, 16 * MEASURED.decode.per_rank
    assert decode.tolist() == pytest.approx([decode[1] - rank, decode[1], decode[1]])
    assert terms(nodes, np.arange(3), ask(digest="other")).decode.tolist() == pytest.approx([decode[1]] * 3)


@given(st.lists(nodes(), min_size=1, max_size=4), REQUESTS, st.data())
def test_a_refused_request_is_told_when_the_first_node_could_keep_its_promise(
    records: list[ListedRecord], request: RoutingRequest, data: st.DataObject
) -> None:
    ttft, tpot = data.draw(st.floats(0.01, 3)), data.draw(st.none() | st.floats(0.01, 1))
    demand = msgspec.structs.replace(request.demand, slo_class="strict", tpot=tpot)
    request = msgspec.structs.replace(request, demand=demand, ttft=ttft)
    table = table_of(*(msgspec.structs.replace(record, id=str(at)) for at, record in enumerate(records)))
    policy = RankAware()
    row = policy.choose(table, np.arange(len(records)), request)
    assert policy.last is not None
    made, possible = forecast(table, np.arange(len(records)), request)
    assert (row is None) == bool(possible.any() and np.isinf(policy.last.totals).all())
    if row is not None:
        assert policy.last.retry_after == 0.0
        return
    waits = []
    for at in np.flatnonzero(possible):
        late = max(0.0, float(made.ttft[at]) - made.ttft_limit)
        others = len(records[at].batch_ranks) + records[at].queued
        answers = request.answer_tokens * float(made.step[at]) / max(1, others)
        waits.append(max(late, answers if made.step[at] > made.tpot_limit[at] else 0.0))
    low, high = RETRY_BOUNDS
    assert policy.last.retry_after == pytest.approx(min(max(min(waits), low), high))


def test_reserved_places_give_their_memory_back_as_running_requests_do() -> None:
    """A burst that no record has told of yet would else look as if it kept what it will have for ever."""
    idle = node("a", tier="device", kv_blocks=100, kv_blocks_free=100)
    nodes = table_of(idle)
    for index in range(5):
        nodes.reserve(0, str(index), Demand(rank=16, prompt_tokens=100, max_tokens=200))
    made = terms(nodes, np.array([0]), ask(typical_tokens=100.0))
    assert made.wait[0] - nodes.prompt_wait[0, STANDARD] == pytest.approx(100 * made.step[0] * 200 / 1500)
    running = node("a", *[16] * 5, tier="device", kv_blocks=100, kv_blocks_free=5)
    told = terms(table_of(running), np.array([0]), ask(typical_tokens=100.0))
    assert told.wait[0] == pytest.approx(100 * told.step[0] * 220 / 1520)


def test_what_strict_requests_wait_for_is_what_those_hold_that_give_nothing_up() -> None:
    full = node("a", *[16] * 5, tier="device", kv_blocks=100, kv_blocks_free=5, strict=StrictRoom(rows=9, blocks=80))
    made = terms(table_of(full), np.array([0]), ask(max_tokens=1300, typical_tokens=100.0, slo_class="strict"))
    assert made.wait[0] == pytest.approx(100 * made.step[0] * (1400 - 1280) / (1600 - 1280))


@pytest.mark.parametrize("column", ["device_wait", "device_per_byte", "prefill_per_token"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_charge_that_is_no_number_keeps_nobody_else_out(column: str, value: float) -> None:
    nodes, policy = table_of(node("home", tier="device"), node("odd")), RankAware(lambda: 0.0)
    getattr(nodes, column)[1] = value
    assert chosen(policy, nodes, ask(id="2", ttft=10.0, slo_class="strict")) == "home"
    assert policy.last is not None and policy.last.totals[1] == np.inf


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 512))
def test_a_row_costs_nothing_up_to_the_flat_ones(flat: int, rows: int, rank: int) -> None:
    decode = msgspec.structs.replace(MEASURED.decode, base=0.02, per_row=1e-3, per_context=0.0, per_rank=0.0)
    model = msgspec.structs.replace(MEASURED, decode=msgspec.structs.replace(decode, flat_rows=flat))
    made = terms(table_of(node("a", *[rank] * rows, performance=model)), np.array([0]), ask())
    assert made.decode[0] == pytest.approx(1e-3 if rows >= flat else 0.0)
    assert made.step[0] == pytest.approx(0.02 + 1e-3 * max(0, rows + 1 - flat))


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_what_is_on_the_link_will_have_passed(share: float) -> None:
    """Of it, as of the adapter itself, only the exposed share was waited for."""
    model = msgspec.structs.replace(MEASURED, exposed_share=share)
    alone, _ = forecast(table_of(node("a", tier="host", performance=model)), np.array([0]), ask())
    busy = table_of(node("a", tier="host", performance=model, loading_bytes=8_000_000_000))
    for part, kept in ((0.999, False), (1.001, True)):
        assert forecast(busy, np.array([0]), ask(ttft=part * float(alone.ttft[0])))[1].tolist() == [kept]
