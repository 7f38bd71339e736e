"""How many calls of batches may begin, by what nodes say of themselves."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.news import NodeRecord
from cluster.node_table import ASSUMED, NodeTable
from cluster.performance_model import DecodeModel, PerformanceModel
from gateway.batches.spare import CALLED_S, LONGER_SHARE, SpareRows


def record(name: str, **changed: Any) -> NodeRecord:
    told: dict[str, Any] = {
        "id": name, "epoch": "1", "seq": 1, "url": "http://n", "state": "ready", "base": "b", "base_id": "b",
        "max_context": 512, "running": 0, "queued": 0, "queue_limit": 8, "kv_blocks_free": 100, "kv_blocks": 100,
        "block_tokens": 16, "max_rows": 16,
    }  # fmt: skip
    return NodeRecord(**told | changed)


def beside(others: int, batch: int, rows: int = 16, **changed: Any) -> dict[str, Any]:
    """What a node says that runs so many calls which are waited for, and so many of batches."""
    return {"running": others + batch, "best_effort": batch, "max_rows": rows, **changed}


def modelled(decode: DecodeModel) -> PerformanceModel:
    return msgspec.structs.replace(ASSUMED, key=msgspec.structs.replace(ASSUMED.key, base="b"), decode=decode)


def table_of(*nodes: dict[str, Any]) -> NodeTable:
    table = NodeTable(8)
    for number, told in enumerate(nodes):
        table.put(record(str(number), **told))
    return table


@pytest.mark.parametrize(
    ("nodes", "spare"),
    [
        ([{}], 14),  # an eighth of its rows is left free
        ([beside(0, 10)], 4),
        ([beside(0, 15)], 0),
        ([beside(1, 0)], 2),  # nothing is known of its steps: an eighth beside others
        ([beside(1, 2)], 0),
        ([{"running": 10, "queued": 9}], 0),  # others wait
        ([beside(0, 2), {"running": 20}], 12),  # a crowded node takes nothing from another's room
        ([{"kv_blocks_free": 0}], 0),
        ([{"queued": 8}], 0),
        ([{"max_rows": 4}], 4),
        ([{"max_rows": 0}], math.inf),
        ([{"state": "draining"}, {}], 14),
        ([{"base": "another"}, {}], 14),
    ],
)
def test_rows_that_nobody_waits_for(nodes: list[dict[str, Any]], spare: float) -> None:
    assert SpareRows(lambda: 0.0).count(table_of(*nodes), "b", 0) == spare


def test_without_a_node_one_call_asks_for_one() -> None:
    rows = SpareRows(lambda: 0.0)
    assert [rows.count(NodeTable(2), "b", in_flight) for in_flight in (0, 1, 2)] == [1, 0, 0]


@given(
    others=st.integers(1, 12), batch=st.integers(0, 20), base=st.floats(0.001, 0.1), per_row=st.floats(1e-6, 0.02),
    flat=st.integers(0, 8),
)  # fmt: skip
def test_batches_lengthen_the_others_steps_by_a_share_at_most(
    others: int, batch: int, base: float, per_row: float, flat: int
) -> None:
    """Begun one by one until none may begin, rows make the step no longer than that; one more would, or there is no
    more room."""
    decode = DecodeModel(base, per_row, 0.0, 0.0, "max_rank", flat)
    rows, begun = SpareRows(lambda: 0.0), batch
    while rows.count(table_of(beside(others, begun, 64, performance=modelled(decode))), "b", begun) >= 1:
        begun += 1
    most = (1 + LONGER_SHARE) * decode.seconds(others, 0, 0)
    if begun > batch:
        assert decode.seconds(others + begun, 0, 0) <= most * 1.001
    if begun + others < 56:
        assert decode.seconds(others + begun + 1, 0, 0) > most * 0.999


def test_a_node_counts_as_called_for_some_seconds() -> None:
    """And no longer: then batches have it to themselves, but for what is always left."""
    now = 0.0
    rows, model = SpareRows(lambda: now), modelled(DecodeModel(0.02, 0.005, 0.0, 0.0, "max_rank"))
    assert rows.count(table_of(beside(1, 0, performance=model)), "b", 0) == 1
    now = CALLED_S - 0.1
    assert rows.count(table_of(beside(0, 0, performance=model)), "b", 0) == 1
    now = CALLED_S
    assert rows.count(table_of(beside(0, 0, performance=model)), "b", 0) == 14


def test_what_has_begun_counts_before_nodes_tell_of_it() -> None:
    """A call that was placed elsewhere meanwhile, or waits for its line, is one all the same."""
    rows, model = SpareRows(lambda: 0.0), modelled(DecodeModel(0.08, 0.01, 0.0, 0.0, "max_rank"))
    assert [rows.count(table_of(beside(1, 0, performance=model)), "b", begun) for begun in range(4)] == [2, 1, 0, 0]
