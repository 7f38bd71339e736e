"""The nodes as columns, so that a placement looks at all of them at once.

Whoever keeps the picture of the nodes (cluster.state, the simulator) changes a node's row when a record comes in and
when a place on it is taken or given back; policies only read. A row stays the node's own until the node is forgotten.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cluster.messages import NEWEST_VERSION
from cluster.model_check import problem_of
from cluster.news import NodeRecord, Resident
from cluster.node_load import MOST, Demand, NodeLoad, found_by_strict, held_by, load_of, tightest_tpot
from cluster.performance_model import (
    RANK_TERMS,
    DecodeModel,
    ModelKey,
    PerformanceModel,
    PrefillModel,
    Transfer,
)
from cluster.queue_shares import room_for_others
from cluster.resident_index import ABSENT, DEVICE, DISK, HOST, TIERS, ResidentIndex

__all__ = [
    "ABSENT",
    "ASSUMED",
    "COLUMNS",
    "DEVICE",
    "DISK",
    "HOST",
    "MOST",
    "RANK_TERMS",
    "TIERS",
    "Demand",
    "NodeTable",
]


COLUMNS: dict[str, type] = {
    "live": np.bool_,  # its record has not expired
    "ready": np.bool_,  # neither warming nor draining
    "full": np.bool_,  # its queue
    "base": np.int64,  # as `base_number` counts
    "heard": np.float64,  # when its record came in, by the receiver's clock
    "crammed": np.bool_,  # so full that it does not even take those who may take another's place in it
    "running": np.int64,
    "queued": np.int64,
    "queue_limit": np.int64,
    "reserved": np.int64,  # places given away that no record has acknowledged
    "max_rows": np.int64,
    "max_context": np.int64,
    "kv_tokens_free": np.int64,
    "kv_tokens": np.int64,
    "kv_promised": np.int64,  # tokens that reserved places will hold when they end
    "contexts": np.int64,  # sum over running requests
    "max_rank": np.int64,  # of running and waiting requests and of reserved places; so are the next two
    "request_ranks": np.int64,
    "adapter_ranks": np.int64,
    "decode_ranks": np.int64,  # R(S) of the node's own rank term, over the same requests
    "prompt_tokens": np.int64,  # not computed yet, reserved places included
    "token_ranks": np.int64,  # sum of tokens * rank of reserved places
    "tightest_tpot": np.float64,  # seconds; infinite where nobody was promised any
    "adapter_bytes_free": np.int64,
    "adapter_bytes": np.int64,
    "loading_bytes": np.int64,
    "modelled": np.bool_,  # whether the columns below are its own; else they are ASSUMED
    "decode_base": np.float64,
    "decode_per_row": np.float64,
    "decode_flat_rows": np.float64,
    "decode_per_context": np.float64,
    "decode_per_rank": np.float64,
    "rank_term": np.int64,  # index into RANK_TERMS
    "prefill_base": np.float64,
    "prefill_per_token": np.float64,
    "prefill_per_token2": np.float64,
    "prefill_per_token_rank": np.float64,
    "device_latency": np.float64,
    "device_bandwidth": np.float64,
    "store_latency": np.float64,
    "store_bandwidth": np.float64,
    "exposed_share": np.float64,
    # What follows from the columns above, so that no request reckons it anew: seconds, but for the first four.
    "requests": np.float64,  # running, queued and reserved
    "capacity": np.float64,  # rows; infinite where the node does not tell
    "rows_free": np.float64,  # negative where requests wait for a row
    "kv_room": np.float64,  # tokens free beyond what reserved places will hold; infinite where it does not tell
    "decode_there": np.float64,  # a step of all its requests, whatever their number
    "decode_next_row": np.float64,  # what one more adds to it by being a row
    "prompt_wait": np.float64,  # for the prompts that are not computed yet
    # The same as strict requests find it: they come before others, and best effort gives its places up to them.
    "strict_ahead": np.float64,  # requests that get a row before one that comes now
    "strict_rows": np.float64,
    "strict_kv_room": np.float64,
    "strict_prompt_wait": np.float64,
    "strict_saved": np.float64,  # that a step takes less while best effort pauses as often as it may
    "strict_tpot": np.float64,  # as tightest_tpot, of strict requests alone
    "device_wait": np.float64,  # until another load's first byte
    "device_per_byte": np.float64,
    "store_per_byte": np.float64,
}

COUNTS = (
    "running", "queued", "queue_limit", "reserved", "max_rows", "max_context", "kv_tokens_free", "kv_tokens",
    "kv_promised", "contexts", "max_rank", "request_ranks", "adapter_ranks", "decode_ranks", "prompt_tokens",
    "token_ranks", "adapter_bytes_free", "adapter_bytes", "loading_bytes",
)  # fmt: skip
"""Columns that lie side by side, so that one operation writes a node's: each would take as long alone."""
DERIVED = (
    "tightest_tpot", "requests", "capacity", "rows_free", "kv_room", "decode_there", "prompt_wait", "strict_ahead",
    "strict_rows", "strict_kv_room", "strict_prompt_wait", "strict_saved", "strict_tpot",
)  # fmt: skip
"""The same of seconds and sums."""
LINEAR_BY_COST = {
    "prefill": ("prefill_per_token", "prefill_per_token2", "prefill_per_token_rank"),
    "decode": ("decode_next_row", "decode_per_context", "decode_per_rank"),
    "transfer": ("device_wait", "device_per_byte"),
    "fetch": ("store_latency", "store_per_byte"),
}
"""What a request's own numbers are multiplied with, by what it costs."""
LINEAR = tuple(name for names in LINEAR_BY_COST.values() for name in names)
"""The same side by side, so that one product of matrices does it."""


ASSUMED = PerformanceModel(
    key=ModelKey(hardware="assumed", base="", dtype="", kernel="", garnish=""),
    decode=DecodeModel(base=0.03, per_row=2e-4, per_context=1e-7, per_rank=2e-6, rank_term="request_ranks"),
    prefill=PrefillModel(base=0.01, per_token=1.5e-4, per_token2=0.0, per_token_rank=2e-7),
    to_device=Transfer(latency=1e-3, bandwidth=8e9),
    from_store=Transfer(latency=2e-2, bandwidth=2e8),
)
"""Of a node that was never measured, so that it is neither free nor out of the question. A 7B on an A10, roughly."""


log = logging.getLogger("cluster")


class Serving(NamedTuple):
    """The nodes that serve a base."""

    rows: np.ndarray
    """i64, ascending; not to be changed"""
    shortest: int
    """tokens of context on the node that has the least; 0 when there is none"""
    longest: int


class NodeTable:
    """`columns.name[row]` is a node's value; rows without a node are not live."""

    def __init__(self, capacity: int) -> None:
        self.ids: list[str | None] = [None] * capacity
        self.generation = np.zeros(capacity, np.int64)
        """Rises with every reservation on the node, by whomever."""
        self._counts = np.zeros((len(COUNTS), capacity), np.int64)
        self._derived = np.zeros((len(DERIVED), capacity), np.float64)
        self.linear = np.zeros((len(LINEAR), capacity), np.float64)
        """f64[LINEAR, capacity]"""
        blocks = ((COUNTS, self._counts), (DERIVED, self._derived), (LINEAR, self.linear))
        together = {name: column for names, block in blocks for name, column in zip(names, block, strict=True)}
        self._data: dict[str, np.ndarray] = {
            name: together[name] if name in together else np.zeros(capacity, kind) for name, kind in COLUMNS.items()
        }
        self.height = 0
        """Rows from here on never had a node."""
        self.padding: set[int] = set()
        """Rows of nodes whose kernel pads to the largest rank (the rank term `max_rank`)."""
        self.older: dict[int, int] = {}
        """By row, the newest version that the node serves, of nodes that would not serve NEWEST_VERSION."""
        self._rows: dict[str, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._residents = ResidentIndex(capacity)
        self._base_numbers: dict[str, int] = {}
        self._base_nodes: dict[str, int] = {}
        self._next_base = itertools.count(1)
        self._problems: dict[int, str] = {}
        self._demands: list[dict[str, Demand]] = [{} for _ in range(capacity)]
        self._records: list[NodeRecord | None] = [None] * capacity
        self._loads: list[NodeLoad | None] = [None] * capacity
        self._models = [ASSUMED] * capacity
        self._terms = [0] * capacity
        """`rank_term`, as the column has it"""
        self._serving: dict[str, Serving] = {}
        """By base. Emptied when a node comes, goes, or changes what counts here: records come all the time, and hardly
        any of them does."""
        self.now = math.nan
        """By the clock of `heard`, when the table was last asked for; NaN where nobody keeps it."""
        vars(self).update(self._data)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> np.ndarray:
            """A column over all rows."""

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, node_id: str) -> int | None:
        return self._rows.get(node_id)

    def record(self, row: int) -> NodeRecord:
        found = self._records[row]
        assert found is not None
        return found

    def tiers(self, digest: str) -> dict[int, int]:
        """Where the adapter is: row -> DEVICE, HOST or DISK. Not to be changed."""
        return self._residents.tiers(digest)

    def users(self, digest: str) -> set[int]:
        """Rows of the nodes where requests hold a lease on the adapter. Not to be changed."""
        return self._residents.users(digest)

    def serving(self, base: str) -> Serving:
        """Those that are live, ready, and of this base."""
        found = self._serving.get(base)
        if found is None:
            rows = np.flatnonzero(self.live & self.ready & (self.base == self.base_number(base)))
            contexts = self.max_context[rows] if rows.size else np.zeros(1, np.int64)
            found = self._serving[base] = Serving(rows, int(contexts.min()), int(contexts.max()))
        return found

    def base_number(self, base: str) -> int:
        """What the column `base` has for nodes that serve this base; -1 when none does."""
        return self._base_numbers.get(base, -1)

    def model_problem(self, row: int) -> str | None:
        """Why the model that the node publishes is not believed; None where it is, or where there is none."""
        return self._problems.get(row)

    def rows(self) -> Iterator[int]:
        return iter(sorted(self._rows.values()))

    def residents(self, row: int) -> Mapping[str, Resident]:
        """By digest. Not to be changed; changes with the node's news."""
        return self._residents.residents(row)

    # --- for whoever keeps the picture

    def put(
        self,
        record: NodeRecord,
        heard: float = math.nan,
        *,
        residents: Sequence[Resident] | None = None,
        changed: Sequence[Resident] = (),
        acknowledged: Iterable[str] = (),
    ) -> int:
        """Take a record in, and end the reservations that are `acknowledged`. `residents`: all of them; None: as they
        were, but for the `changed` ones. Returns the node's row. Raises IndexError when the table is full."""
        row = self._rows.get(record.id)
        if row is None:
            row = self._rows[record.id] = self._free.pop()
            self.ids[row] = record.id
            self.height = max(self.height, row + 1)
        before = self._records[row]
        if before is not None and before.epoch != record.epoch:
            self._demands[row].clear()
        self._records[row], self._loads[row] = record, load_of(record)
        for request_id in acknowledged:
            self._demands[row].pop(request_id, None)
        if residents is not None:
            self._residents.put(row, residents)
        self._residents.change(row, changed)
        if before is None or before.base != record.base:
            self._rebase(row, before.base if before else None, record.base)
        if before is None or (before.performance, before.base) != (record.performance, record.base):
            self._model(row, record.performance, record.base)
        self.older.pop(row, None)
        if record.accepts < NEWEST_VERSION:
            self.older[row] = record.accepts
        self._refresh(row)
        self.heard[row] = heard
        if before is None or not self.live[row] or _counts(before) != _counts(record):
            self._serving.clear()
        self.live[row] = True
        return row

    def expire(self, row: int) -> None:
        """Its record is too old."""
        self.live[row] = False
        self._serving.clear()

    def remove(self, node_id: str) -> None:
        row = self._rows.pop(node_id, None)
        if row is None:
            return
        self._serving.clear()
        self._residents.put(row, [])
        self._rebase(row, self.record(row).base, None)
        self._problems.pop(row, None)
        for column in self._data.values():
            column[row] = 0
        for name in ("rows_free", "kv_room", "strict_rows", "strict_kv_room"):  # nobody waits there
            self._data[name][row] = math.inf
        self.padding.discard(row)
        self.older.pop(row, None)
        self.ids[row], self._records[row], self._loads[row], self.generation[row] = None, None, None, 0
        self._demands[row].clear()
        self._free.append(row)

    def reserve(self, row: int, request_id: str, demand: Demand) -> None:
        """Again what is known already changes the generation alone: a worker hears of its own reservations twice."""
        known = self._demands[row].get(request_id) == demand
        self._demands[row][request_id] = demand
        self.generation[row] += 1
        if not known:
            self._refresh(row)

    def takes(self, row: int, demand: Demand) -> bool:
        """Whether there is a place for it in the node's queue."""
        return not (self.crammed if demand.displaces else self.full)[row]

    def release(self, row: int, request_id: str) -> None:
        """Nothing happens when the reservation has ended already."""
        if self._demands[row].pop(request_id, None) is not None:
            self._refresh(row)

    def reservations(self, row: int) -> dict[str, Demand]:
        """By request. Not to be changed."""
        return self._demands[row]

    def _refresh(self, row: int) -> None:
        """The columns that follow from record, reservations and model."""
        load, demands, model = self._loads[row], list(self._demands[row].values()), self._models[row]
        assert load is not None
        held = held_by(demands)
        waiting, limit, prompts = load.queued + len(demands), load.queue_limit, load.prompt_tokens + held.prompt_tokens
        requests, largest = load.running + waiting, max(load.max_rank, held.max_rank)
        request_ranks, adapter_ranks = load.request_ranks + held.ranks, load.adapter_ranks + held.ranks
        by_term = (requests * largest, request_ranks, adapter_ranks)
        decode_ranks = min(by_term[self._terms[row]], MOST)
        self._counts[:, row] = (  # in the order of COUNTS
            load.running, load.queued, limit, len(demands), load.max_rows, load.max_context, load.kv_tokens_free,
            load.kv_tokens, held.tokens, load.contexts, largest, request_ranks, adapter_ranks, decode_ranks, prompts,
            held.token_ranks, load.adapter_bytes_free, load.adapter_bytes, load.loading_bytes,
        )  # fmt: skip
        capacity = load.max_rows or math.inf
        kv_room = load.kv_tokens_free - held.tokens if load.kv_tokens else math.inf
        prompt_wait = model.prefill.seconds(prompts, 0, held.token_ranks) if prompts else 0.0
        found = requests, capacity, kv_room, prompt_wait, 0.0, math.inf
        promised = [load.tightest_tpot, *(demand.tpot for demand in demands if demand.tpot is not None)]
        self._derived[:, row] = (  # in the order of DERIVED
            tightest_tpot(promised, model),
            requests,
            capacity,
            capacity - requests,
            kv_room,
            model.decode.seconds(requests, load.contexts + prompts, decode_ranks),
            prompt_wait,
            *(found if load.strict is None else found_by_strict(load, load.strict, demands, model)),
        )
        self.decode_next_row[row] = model.decode.next_row(requests)
        self.device_wait[row] = model.to_device.seconds(load.loading_bytes)
        self.ready[row] = load.ready
        self.full[row], self.crammed[row] = waiting >= limit, waiting >= limit + room_for_others(limit)

    def _model(self, row: int, measured: PerformanceModel | None, base: str) -> None:
        problem = problem_of(measured, base) if measured is not None else None
        if problem is None:
            self._problems.pop(row, None)
        elif self._problems.get(row) != problem:
            self._problems[row] = problem
            log.warning("the performance model of node %s is not used: %s", self.ids[row], problem)
        model = self._models[row] = measured if measured is not None and problem is None else ASSUMED
        self.modelled[row] = model is not ASSUMED
        for field in ("base", "per_row", "flat_rows", "per_context", "per_rank"):
            self._data[f"decode_{field}"][row] = getattr(model.decode, field)
        self._terms[row] = self.rank_term[row] = RANK_TERMS.index(model.decode.rank_term)
        (self.padding.add if model.decode.rank_term == "max_rank" else self.padding.discard)(row)
        for field in ("base", "per_token", "per_token2", "per_token_rank"):
            self._data[f"prefill_{field}"][row] = getattr(model.prefill, field)
        for link, transfer in (("device", model.to_device), ("store", model.from_store)):
            self._data[f"{link}_latency"][row] = transfer.latency
            self._data[f"{link}_bandwidth"][row] = transfer.bandwidth
            self._data[f"{link}_per_byte"][row] = 1.0 / transfer.bandwidth
        self.exposed_share[row] = model.exposed_share

    def _rebase(self, row: int, before: str | None, after: str | None) -> None:
        if after is not None:
            self._base_nodes[after] = self._base_nodes.get(after, 0) + 1
            if after not in self._base_numbers:
                self._base_numbers[after] = next(self._next_base)
            self.base[row] = self._base_numbers[after]
        if before is not None:
            self._base_nodes[before] -= 1
            if not self._base_nodes[before]:
                del self._base_nodes[before], self._base_numbers[before]


def _counts(record: NodeRecord) -> tuple[str, bool, int]:
    """What of a record decides whom the node serves."""
    return record.base, record.state == "ready", record.max_context
