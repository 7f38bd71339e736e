"""Table of the nodes in columns, so that a routing decision reads all nodes at once.

The owner of the snapshot (cluster.state or the simulator) updates a node's row when a record arrives, and when a place
is reserved or released. Policies only read. A node keeps its row until it is forgotten.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.model_check import problem_of
from cluster.news import NodeRecord, Resident
from cluster.node_load import (
    MAX_COUNT,
    Availability,
    Demand,
    NodeLoad,
    availability_for_strict,
    load_of,
    prompts_before,
    reserved_load,
    tightest_tpot,
)
from cluster.performance_model import RANK_TERMS, DecodeModel, ModelKey, PerformanceModel, PrefillModel, Transfer
from cluster.queue_shares import room_for_others
from cluster.resident_index import ABSENT, DEVICE, DISK, HOST, TIERS, ResidentIndex

__all__ = [
    "ABSENT", "ASSUMED", "COLUMNS", "DEVICE", "DISK", "HOST", "MAX_COUNT", "RANK_TERMS", "STANDARD", "STRICT", "TIERS",
    "Demand", "NodeTable",
]  # fmt: skip


ROW = np.dtype(
    [
        ("ready", "?"),  # neither warming nor draining
        ("full", "?"),  # the queue takes no more requests
        ("crammed", "?"),  # the queue takes not even requests that may displace another one
        ("modelled", "?"),  # the node has a usable performance model; else it is ASSUMED
        ("max_context", "i8"),
        ("rank_limit", "i8"),  # largest rank of an adapter that the node takes; MAX_COUNT if it takes any
        ("requests", "f8"),  # running, queued and reserved
        ("best_effort", "f8"),  # best-effort ones among `requests`
        ("max_rank", "f8"),  # largest adapter rank among `requests`
        ("capacity", "f8"),  # maximum batch rows; infinite where not reported
        ("kv_tokens", "f8"),
        # Two values each (STANDARD, STRICT): best-effort requests give up their places to strict ones.
        ("rows_free", "f8", 2),  # negative where requests wait for a row
        ("kv_room", "f8", 2),  # free KV tokens, less those of reserved places; infinite where not reported
        ("prompt_wait", "f8", 2),  # seconds that waiting prompts add to the pass of a new prompt
        ("tightest_tpot", "f8", 2),  # seconds, of all and of strict requests; infinite without a promise
        ("strict_saved", "f8"),  # seconds by which a step is shorter while best-effort requests pause
        ("decode_there", "f8"),  # seconds of a step of all `requests`, even if they exceed `capacity`
        ("decode_base", "f8"),
        ("decode_next_row", "f8"),  # seconds that one more row adds to that step
        ("decode_per_row", "f8"),  # seconds that one more row adds beyond `flat_rows` rows
        ("flat_rows", "i8"),
        ("decode_per_context", "f8"),
        ("decode_per_rank", "f8"),
        ("rank_term", "i8"),  # index into RANK_TERMS
        ("decode_padded_rank", "f8"),  # rank as which a smaller one counts
        ("prefill_base", "f8"),
        ("prefill_per_token", "f8"),
        ("prefill_per_token2", "f8"),
        ("prefill_per_token_rank", "f8"),
        ("prefill_padded_rank", "f8"),
        ("adapter_itemsize", "f8"),  # bytes of an adapter's element on the device; 0: not reported
        ("device_wait", "f8"),  # seconds until another load's first byte
        ("device_per_byte", "f8"),
        ("store_latency", "f8"),
        ("store_per_byte", "f8"),
        ("exposed_share", "f8"),
    ]
)
"""Columns that are computed from a node's record, the places reserved on it and its performance model."""
COLUMNS = ("live", "last_seen", *(ROW.names or ()))
STANDARD, STRICT = range(2)
"""Indices into the columns of ROW that have two values per node. STANDARD is the value for standard and best-effort
requests, STRICT the value for strict requests."""


ASSUMED = PerformanceModel(
    key=ModelKey(hardware="assumed", base="", dtype="", kernel="", garnish=""),
    decode=DecodeModel(base=0.03, per_row=2e-4, per_context=1e-7, per_rank=2e-6, rank_term="request_ranks"),
    prefill=PrefillModel(base=0.01, per_token=1.5e-4, per_token2=0.0, per_token_rank=2e-7),
    to_device=Transfer(latency=1e-3, bandwidth=8e9),
    from_store=Transfer(latency=2e-2, bandwidth=2e8),
)
"""Performance model of a node without measurements, so that it counts neither as free nor as unusable. It is roughly a
7B model on an A10."""


log = logging.getLogger("cluster")


class ServingNodes(NamedTuple):
    """Nodes that serve a base model."""

    rows: np.ndarray
    """Rows of the nodes, i64[nodes], ascending. Must not be changed."""
    shortest: int
    """Smallest maximum context (tokens) of the nodes; 0 without nodes."""
    longest: int
    lowest_rank_limit: int
    """Smallest of the nodes' limits of an adapter's rank."""

    def taking(self, nodes: NodeTable, rank: int) -> np.ndarray:
        """Returns i64[C]: the ascending rows of the nodes that take adapters of this rank. Must not be changed."""
        return self.rows if rank <= self.lowest_rank_limit else self.rows[nodes.rank_limit[self.rows] >= rank]


class NodeTable:
    """Columns of values by row: `table.NAME[row]` is a node's value of column NAME. Rows without a node are not
    live."""

    def __init__(self, capacity: int) -> None:
        self.ids: list[str | None] = [None] * capacity
        self.generation = np.zeros(capacity, np.int64)
        """Counter per row that rises with every reservation on the node, whichever worker makes it."""
        self.table = np.zeros(capacity, ROW)
        self.live = np.zeros(capacity, np.bool_)
        """bool[rows]: whether the node's record has not expired."""
        self.last_seen = np.zeros(capacity, np.float64)
        """f64[rows]: time (seconds, receiver's clock) at which the node's last record arrived."""
        self._rows: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._residents = ResidentIndex(capacity)
        self._problems: dict[int, str] = {}
        self._demands: list[dict[str, Demand]] = [{} for _ in range(capacity)]
        self._records: list[NodeRecord | None] = [None] * capacity
        self._loads: list[NodeLoad | None] = [None] * capacity
        self._models = [ASSUMED] * capacity
        self._serving: dict[str, ServingNodes] = {}
        """Cache of the nodes that serve each base. It is cleared when a node is added, expires, is removed, or changes
        one of the fields that `_counts` returns. Most records change none of these."""
        self.now = math.nan
        """Time of the last read of the table, by the clock of `last_seen`. It is NaN where the owner does not set
        it."""
        vars(self).update({name: self.table[name] for name in ROW.names or ()})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> np.ndarray:
            """Returns the column of this name, with one value per row."""

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, node_id: str) -> int | None:
        """Returns the node's row; None for an unknown node."""
        return self._rows.get(node_id)

    def record(self, row: int) -> NodeRecord:
        """Returns the latest record of the row's node."""
        record = self._records[row]
        assert record is not None
        return record

    def load(self, row: int) -> NodeLoad:
        """Returns the load from the node's latest record."""
        load = self._loads[row]
        assert load is not None
        return load

    def model(self, row: int) -> PerformanceModel:
        """Returns the performance model used for forecasts of the node; ASSUMED when its own is missing or unusable."""
        return self._models[row]

    def tiers(self, digest: str) -> dict[int, int]:
        """Returns the adapter's tier (DEVICE, HOST or DISK) by row. The result must not be changed."""
        return self._residents.tiers(digest)

    def users(self, digest: str) -> set[int]:
        """Returns the rows of the nodes on which requests hold a lease on the adapter. The result must not be
        changed."""
        return self._residents.users(digest)

    def serving(self, base: str) -> ServingNodes:
        """Returns the nodes of this base that are live and ready."""
        serving = self._serving.get(base)
        if serving is None:
            rows = np.flatnonzero(self.live & self.ready)
            rows = rows[[self.record(row).base == base for row in rows.tolist()]]
            contexts = self.max_context[rows] if rows.size else np.zeros(1, np.int64)
            lowest = int(self.rank_limit[rows].min(initial=MAX_COUNT))
            serving = ServingNodes(rows, int(contexts.min()), int(contexts.max()), lowest)
            self._serving[base] = serving
        return serving

    def model_problem(self, row: int) -> str | None:
        """Returns the problem of the performance model that the node publishes; None if it has none, or publishes no
        model."""
        return self._problems.get(row)

    def rows(self) -> Iterator[int]:
        """Returns the rows that have a node, ascending."""
        return iter(sorted(self._rows.values()))

    def residents(self, row: int) -> Mapping[str, Resident]:
        """Returns a live view of the adapters that the node holds, by digest. It must not be changed."""
        return self._residents.residents(row)

    # --- for the owner of the table

    def put(
        self,
        record: NodeRecord,
        last_seen: float = math.nan,
        *,
        residents: Sequence[Resident] | None = None,
        changed: Sequence[Resident] = (),
        acknowledged: Iterable[str] = (),
    ) -> int:
        """Applies a node's record, and ends the reservations that are `acknowledged`. `residents` are all adapters of
        the node; None: unchanged, except for the `changed` ones. Returns the node's row. Raises IndexError when the
        table is full."""
        row = self._rows.get(record.id)
        if row is None:
            row = self._rows[record.id] = self._free.pop()
            self.ids[row] = record.id
        before = self._records[row]
        if before is not None and before.epoch != record.epoch:
            self._demands[row].clear()
        self._records[row], self._loads[row] = record, load_of(record)
        for request_id in acknowledged:
            self._demands[row].pop(request_id, None)
        if residents is not None:
            self._residents.put(row, residents)
        self._residents.change(row, changed)
        if before is None or (before.performance, before.base) != (record.performance, record.base):
            self._model(row, record.performance, record.base)
        self._refresh(row)
        self.last_seen[row] = last_seen
        if before is None or not self.live[row] or _counts(before) != _counts(record):
            self._serving.clear()
        self.live[row] = True
        return row

    def expire(self, row: int) -> None:
        """Marks the row's node as not live: its record is too old."""
        self.live[row] = False
        self._serving.clear()

    def remove(self, node_id: str) -> None:
        """Removes the node and clears its row. Does nothing for an unknown node."""
        row = self._rows.pop(node_id, None)
        if row is None:
            return
        self._serving.clear()
        self._residents.put(row, [])
        self._problems.pop(row, None)
        self.table[row], self.live[row], self.last_seen[row] = 0, False, 0.0
        self.ids[row], self._records[row], self._loads[row], self.generation[row] = None, None, None, 0
        self._demands[row].clear()
        self._free.append(row)

    def reserve(self, row: int, request_id: str, demand: Demand) -> None:
        """Adds a reservation of the request to the row. A reservation that is already there only raises the generation,
        because a worker receives its own reservations twice."""
        is_known = self._demands[row].get(request_id) == demand
        self._demands[row][request_id] = demand
        self.generation[row] += 1
        if not is_known:
            self._refresh(row)

    def takes(self, row: int, demand: Demand) -> bool:
        """Returns whether the node's queue has a place for the demand."""
        return not (self.crammed if demand.displaces else self.full)[row]

    def release(self, row: int, request_id: str) -> None:
        """Removes the request's reservation. Does nothing when it has already ended."""
        if self._demands[row].pop(request_id, None) is not None:
            self._refresh(row)

    def reservations(self, row: int) -> dict[str, Demand]:
        """Returns the demands of the reservations on the node, by request id. The result must not be changed."""
        return self._demands[row]

    def _refresh(self, row: int) -> None:
        """Recomputes the row's columns from its record, reservations and model."""
        load, demands, model = self.load(row), list(self._demands[row].values()), self._models[row]
        reserved, decode, prefill = reserved_load(demands, model), model.decode, model.prefill
        waiting, limit, prompts = (
            load.queued + len(demands),
            load.queue_limit,
            load.prompt_tokens + reserved.prompt_tokens,
        )
        requests, largest = load.running + waiting, max(load.max_rank, reserved.max_rank)
        capacity = load.max_rows or math.inf
        ranks = {
            "max_rank": requests * largest,
            "request_ranks": load.request_ranks + reserved.ranks,
            "adapter_ranks": load.adapter_ranks + reserved.ranks,
        }[decode.rank_term]
        promised = [load.tightest_tpot, *(demand.tpot for demand in demands if demand.tpot is not None)]
        standard = Availability(
            rows_free=capacity - requests,
            kv_room=load.kv_tokens_free - reserved.tokens if load.kv_tokens else math.inf,
            prompt_wait=prompts_before(prefill, prompts, reserved.token_ranks),
        )
        strict = standard if load.strict is None else availability_for_strict(load, load.strict, demands, model)
        self.table[row] = (  # in the order of ROW
            load.ready, waiting >= limit, waiting >= limit + room_for_others(limit), model is not ASSUMED,
            load.max_context, load.rank_limit, requests, load.best_effort + reserved.best_effort, largest, capacity,
            load.kv_tokens,
            (standard.rows_free, strict.rows_free), (standard.kv_room, strict.kv_room),
            (standard.prompt_wait, strict.prompt_wait), (tightest_tpot(promised, model), strict.tightest_tpot),
            strict.saved,
            decode.seconds(requests, load.contexts + prompts, min(ranks, MAX_COUNT)),
            decode.base, decode.next_row(requests), decode.per_row, decode.flat_rows, decode.per_context,
            decode.per_rank, RANK_TERMS.index(decode.rank_term), decode.padded_rank, prefill.base, prefill.per_token,
            prefill.per_token2, prefill.per_token_rank, prefill.padded_rank, load.adapter_itemsize,
            model.to_device.seconds(load.loading_bytes), 1.0 / model.to_device.bandwidth,
            model.from_store.latency, 1.0 / model.from_store.bandwidth, model.exposed_share,
        )  # fmt: skip

    def _model(self, row: int, measured: PerformanceModel | None, base: str) -> None:
        problem = problem_of(measured, base) if measured is not None else None
        if problem is None:
            self._problems.pop(row, None)
        elif self._problems.get(row) != problem:
            self._problems[row] = problem
            log.warning("the performance model of node %s is not used: %s", self.ids[row], problem)
        self._models[row] = measured if measured is not None and problem is None else ASSUMED


def _counts(record: NodeRecord) -> tuple[str, bool, int, int]:
    """Returns the fields of a record that decide which calls the node serves: base, whether it is ready, maximum
    context, limit of an adapter's rank."""
    return record.base, record.state == "ready", record.max_context, record.rank_limit
