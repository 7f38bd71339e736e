"""The columns against a plain recount from records and reservations, over drawn runs."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import RECORD

from cluster.news import Resident, StrictRoom
from cluster.node_table import ASSUMED, DEVICE, HOST, MAX_COUNT, RANK_TERMS, TIERS, Demand, NodeTable
from tests.support.listed_record import ListedRecord, put_record

RANKS = st.lists(st.integers(0, 512), max_size=6)
RECORDS = st.builds(
    lambda node, epoch, base, ranks, waiting, tpot, adapters, used, acknowledged, strict: msgspec.structs.replace(
        RECORD,
        id=node,
        base=base,
        running=len(ranks),
        performance=msgspec.structs.replace(
            ASSUMED, decode=msgspec.structs.replace(ASSUMED.decode, rank_term=RANK_TERMS[len(ranks) % 3])
        ),
        epoch=epoch,
        batch_ranks=ranks,
        batch_slots=[rank % 3 for rank in ranks],
        batch_contexts=[2 * rank for rank in ranks],
        queued=len(waiting),
        queued_ranks=waiting,
        tightest_tpot=tpot,
        residents=[Resident(digest, tier, 1, digest in used) for digest, tier in adapters.items()],
        acknowledged=acknowledged,
        strict=strict,
    ),
    st.sampled_from("abc"),
    st.sampled_from("12"),
    st.sampled_from("bc"),
    RANKS,
    RANKS,
    st.none() | st.floats(0.001, 1),
    st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["device", "host", "disk"])),
    st.sets(st.sampled_from("xyz")),
    st.lists(st.sampled_from("pqr"), max_size=2),
    st.none() | st.builds(StrictRoom, *[st.integers(0, 9)] * 6),
)
DEMANDS = st.builds(
    Demand,
    st.integers(0, 512),
    st.integers(0, 100),
    st.integers(0, 100),
    st.none() | st.floats(0.001, 1),
    st.booleans(),
    st.sampled_from(["strict", "standard", "best_effort"]),
)
STEPS = st.lists(
    st.tuples(st.just("put"), RECORDS)
    | st.tuples(st.just("reserve"), st.sampled_from("abc"), st.sampled_from("pqr"), DEMANDS)
    | st.tuples(st.just("release"), st.sampled_from("abc"), st.sampled_from("pqr"))
    | st.tuples(st.just("remove"), st.sampled_from("abc")),
    max_size=30,
)


@given(STEPS)
def test_columns_say_what_records_and_reservations_say(steps: list[tuple]) -> None:
    table = NodeTable(3)
    records: dict[str, ListedRecord] = {}
    places: dict[str, dict[str, Demand]] = {}
    for step in steps:
        if step[0] == "put":
            record = step[1]
            if record.id in records and records[record.id].epoch != record.epoch:
                places[record.id] = {}
            records[record.id] = record
            held = places.setdefault(record.id, {})
            for request in record.acknowledged:
                held.pop(request, None)
            put_record(table, record)
        elif step[1] in records:
            row = table.row(step[1])
            assert row is not None
            if step[0] == "reserve":
                before = int(table.generation[row])
                places[step[1]][step[2]] = step[3]
                table.reserve(row, step[2], step[3])
                assert table.generation[row] == before + 1
            elif step[0] == "release":
                places[step[1]].pop(step[2], None)
                table.release(row, step[2])
            else:
                del records[step[1]], places[step[1]]
                table.remove(step[1])
                assert not table.live[row]
    _compare(table, records, places)


SERVED = st.tuples(
    st.sampled_from(["put", "put", "put", "expire", "remove"]),
    st.builds(
        lambda name, state, base, context: msgspec.structs.replace(
            RECORD, id=name, state=state, base=base, max_context=context
        ),
        st.sampled_from("abc"),
        st.sampled_from(["ready", "ready", "draining"]),
        st.sampled_from("xy"),
        st.integers(1, 4),
    ),
)


@given(st.lists(SERVED, max_size=25))
def test_who_serves_a_base_after_a_drawn_history(steps: list[tuple[str, ListedRecord]]) -> None:
    """Asked after every step: what is remembered from one time to the next must not outlive a change."""
    table = NodeTable(3)
    alive: dict[str, ListedRecord] = {}
    for step, record in steps:
        row = table.row(record.id)
        if step == "put":
            put_record(table, record)
            alive[record.id] = record
        elif row is not None:
            alive.pop(record.id, None)
            table.expire(row) if step == "expire" else table.remove(record.id)
        for base in "xyz":
            told = {name: known for name, known in alive.items() if known.state == "ready" and known.base == base}
            found = table.serving(base)
            assert found.rows.tolist() == sorted(rows for name in told if (rows := table.row(name)) is not None)
            contexts = [known.max_context for known in told.values()] or [0]
            assert (found.shortest, found.longest) == (min(contexts), max(contexts))


def _compare(table: NodeTable, records: dict[str, ListedRecord], places: dict[str, dict[str, Demand]]) -> None:
    assert {table.ids[row] for row in table.rows()} == set(records)
    assert int(table.live.sum()) == len(records) == len(table)
    for name, record in records.items():
        row, held = table.row(name), places[name].values()
        assert row is not None
        assert table.reservations(row) == places[name]
        assert table.requests[row] == record.running + record.queued + len(held)
        assert table.full[row] == (record.queued + len(held) >= record.queue_limit)
        for digest in "xyz":
            tier = next((r.tier for r in record.residents if r.digest == digest), None)
            assert table.tiers(digest).get(row) == TIERS.get(tier or "")
            assert (row in table.users(digest)) == any(r.digest == digest and r.in_use for r in record.residents)
    rows = {table.row(name) for name in records}
    assert all(set(table.tiers(digest)) | table.users(digest) <= rows for digest in "xyz")


def test_an_unmeasured_node_has_a_model_that_is_neither_free_nor_infinite() -> None:
    table = NodeTable(1)
    row = put_record(table, RECORD)
    assert not table.modelled[row]
    assert 0 < table.decode_base[row] < np.inf
    assert DEVICE < HOST


def test_no_count_is_negative_or_too_large_to_reckon_with() -> None:
    table = NodeTable(1)
    odd = {"running": -5, "queued": 1 << 70, "batch_contexts": [1 << 70], "batch_ranks": [-3], "loading_bytes": -1}
    row = put_record(table, msgspec.structs.replace(RECORD, tightest_tpot=math.nan, **odd))
    load = table.load(row)
    assert (load.running, load.queued, load.contexts) == (0, MAX_COUNT, MAX_COUNT)
    assert (load.max_rank, load.request_ranks, load.loading_bytes) == (0, 0, 0)
    assert (table.tightest_tpot[row] == math.inf).all()
    put_record(table, msgspec.structs.replace(RECORD, tightest_tpot=-1.0))
    table.reserve(row, "p", Demand(tpot=0.05))
    assert table.tightest_tpot[row].tolist() == [0.05, math.inf]


def test_a_model_that_can_not_be_reckoned_with_is_told_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    table = NodeTable(1)
    odd = msgspec.structs.replace(ASSUMED, decode=msgspec.structs.replace(ASSUMED.decode, per_row=math.nan))
    for _ in range(3):
        row = put_record(table, msgspec.structs.replace(RECORD, performance=odd))
    assert table.model_problem(row) == "decode.per_row is nan, not between 0 and 1e+06"
    assert not table.modelled[row] and table.model(row) is ASSUMED
    assert caplog.text.count("the performance model of node a is not used: decode.per_row") == 1
    put_record(table, msgspec.structs.replace(RECORD, performance=msgspec.structs.replace(ASSUMED, exposed_share=0.5)))
    assert (table.model_problem(row), table.modelled[row], table.exposed_share[row]) == (None, True, 0.5)
    table.remove("a")
    assert table.model_problem(row) is None


def test_a_model_of_another_base_is_not_used() -> None:
    table = NodeTable(1)
    own = msgspec.structs.replace(ASSUMED, key=msgspec.structs.replace(ASSUMED.key, base="b"))
    row = put_record(table, msgspec.structs.replace(RECORD, performance=own, base=""))
    assert table.model_problem(row) is None, "its base is not known yet"
    put_record(table, msgspec.structs.replace(RECORD, performance=own, base="c"))
    assert table.model_problem(row) == "key.base is b, and the node serves c"
    put_record(table, msgspec.structs.replace(RECORD, performance=own))
    assert (table.model_problem(row), bool(table.modelled[row])) == (None, True)
