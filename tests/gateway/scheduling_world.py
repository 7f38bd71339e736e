"""Nodes and requests for tests of routing: records as nodes send them, and a table of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from cluster.news import Resident
from cluster.node_table import ASSUMED, Demand, NodeTable
from cluster.performance_model import PerformanceModel
from gateway.scheduling.policy import Policy
from gateway.scheduling.request import RoutingRequest
from tests.support.listed_record import ListedRecord, put_record

MEASURED = msgspec.structs.replace(
    ASSUMED, key=msgspec.structs.replace(ASSUMED.key, hardware="bench", base="b", dtype="float32", kernel="mbgmv")
)
RECORD = ListedRecord(
    id="n", epoch="1", seq=1, url="http://127.0.0.1:1", state="ready", base="b", base_id="base", max_context=8192,
    running=0, queued=0, queue_limit=64, kv_blocks_free=2000, kv_blocks=2000, block_tokens=16, max_rows=32,
    performance=MEASURED,
)  # fmt: skip
REQUEST = RoutingRequest("r", Demand(16, 100, 200), "d", 40_000_000, expected_tokens=100)


def node(node_id: str, *ranks: int, tier: str | None = None, **changed: Any) -> ListedRecord:
    """A node with a running request of each of `ranks`; `tier`: where it has the adapter of REQUEST."""
    fields: dict[str, Any] = {
        "id": node_id,
        "running": len(ranks),
        "batch_ranks": list(ranks),
        "batch_contexts": [50] * len(ranks),
        "batch_slots": list(range(len(ranks))),
        "residents": [] if tier is None else [Resident("d", tier, 40_000_000, 0)],
    }
    return msgspec.structs.replace(RECORD, **(fields | changed))


def slow(factor: float, model: PerformanceModel = MEASURED) -> PerformanceModel:
    """The same node, computing so many times as long."""
    decode, prefill = model.decode, model.prefill
    return msgspec.structs.replace(
        model,
        decode=msgspec.structs.replace(
            decode,
            base=decode.base * factor,
            per_row=decode.per_row * factor,
            per_context=decode.per_context * factor,
            per_rank=decode.per_rank * factor,
        ),
        prefill=msgspec.structs.replace(prefill, base=prefill.base * factor, per_token=prefill.per_token * factor),
    )


def table_of(*records: ListedRecord) -> NodeTable:
    table = NodeTable(max(8, len(records)))
    for record in records:
        put_record(table, record)
    return table


def chosen(policy: Policy, nodes: NodeTable, request: RoutingRequest = REQUEST) -> str | None:
    row = policy.choose(nodes, np.array(list(nodes.rows())), request)
    return None if row is None else nodes.ids[row]


def ask(**changed: Any) -> RoutingRequest:
    """REQUEST with other fields, its demand's included."""
    of_demand = {name: changed.pop(name) for name in Demand.__struct_fields__ if name in changed}
    return msgspec.structs.replace(REQUEST, demand=msgspec.structs.replace(REQUEST.demand, **of_demand), **changed)
