"""How many calls of batches may begin, by what nodes say of themselves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cluster.news import NodeRecord
from cluster.node_table import NodeTable
from gateway.batches.spare import spare_rows


def record(name: str, **changed: Any) -> NodeRecord:
    told: dict[str, Any] = {
        "id": name, "epoch": "1", "seq": 1, "url": "http://n", "state": "ready", "base": "b", "base_id": "b",
        "max_context": 512, "running": 0, "queued": 0, "queue_limit": 8, "kv_blocks_free": 100, "kv_blocks": 100,
        "block_tokens": 16, "max_rows": 16,
    }  # fmt: skip
    return NodeRecord(**told | changed)


@pytest.mark.parametrize(
    ("nodes", "spare"),
    [
        ([{}], 14),  # an eighth of its rows is left free
        ([{"running": 10}], 4),
        ([{"running": 15}], 0),
        ([{"running": 10, "queued": 9}], 0),  # others wait
        ([{"running": 2}, {"running": 20}], 12),  # a crowded node takes nothing from another's room
        ([{"kv_blocks_free": 0}], 0),
        ([{"queued": 8}], 0),
        ([{"max_rows": 4}], 4),
        ([{"max_rows": 0}], math.inf),
        ([{"state": "draining"}, {}], 14),
        ([{"base": "another"}, {}], 14),
    ],
)
def test_rows_that_nobody_waits_for(nodes: list[dict[str, Any]], spare: float) -> None:
    table = NodeTable(8)
    for number, told in enumerate(nodes):
        table.put(record(str(number), **told))
    assert spare_rows(table, "b", 3) == spare


def test_without_a_node_one_call_asks_for_one() -> None:
    assert [spare_rows(NodeTable(2), "b", in_flight) for in_flight in (0, 1, 2)] == [1, 0, 0]
