"""Every column of every node after drawn comings, goings and reservations, reckoned from what the columns are said to
be: nodes return with other models, rows are used again, and models are of every kind, no models among them."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.news import Resident, StrictRoom
from cluster.node_table import ASSUMED, COLUMNS, RANK_TERMS, Demand, NodeTable
from cluster.performance_model import DecodeModel, PerformanceModel, PrefillModel, Transfer
from tests.support.listed_record import ListedRecord, put_record

ROWS = 3
SECONDS = st.floats(0, 0.1)
MODELS = st.builds(
    PerformanceModel,
    st.just(ASSUMED.key),
    st.builds(
        DecodeModel,
        st.floats(1e-3, 0.1),
        SECONDS,
        SECONDS,
        SECONDS,
        st.sampled_from(RANK_TERMS),
        st.integers(0, 9),
        st.sampled_from([0, 64]),
    ),
    st.builds(PrefillModel, SECONDS, SECONDS, SECONDS, SECONDS, st.sampled_from([0, 64])),
    st.builds(Transfer, SECONDS, st.floats(1.0, 1e12)),
    st.builds(Transfer, SECONDS, st.floats(1.0, 1e12)),
    st.floats(0, 1),
)


def spoilt(**changed: float) -> PerformanceModel:
    return msgspec.structs.replace(ASSUMED, decode=msgspec.structs.replace(ASSUMED.decode, **changed))


BAD = [
    spoilt(per_row=math.nan),
    spoilt(base=-1.0),
    spoilt(per_rank=math.inf),
    spoilt(flat_rows=-1),
    spoilt(base=0.0, flat_rows=1),
    msgspec.structs.replace(ASSUMED, to_device=Transfer(0.0, math.inf)),
    msgspec.structs.replace(ASSUMED, from_store=Transfer(0.0, 0.0)),
    msgspec.structs.replace(ASSUMED, exposed_share=math.nan),
    msgspec.structs.replace(ASSUMED, key=msgspec.structs.replace(ASSUMED.key, base="another")),
]
COUNTS = st.integers(0, 40)
TPOTS = st.none() | st.sampled_from([math.nan, math.inf, 0.0, -1.0]) | st.floats(1e-3, 1)
RANKS = st.lists(st.integers(0, 512), max_size=5)
RECORDS = st.builds(
    lambda ranks, waiting, tier, in_use, **fields: ListedRecord(
        seq=1, url="http://127.0.0.1:1", base_id="base", running=len(ranks), batch_ranks=ranks,
        batch_slots=[rank % 3 - 1 for rank in ranks], batch_contexts=[3 * rank for rank in ranks],
        queued=len(waiting), queued_ranks=waiting,
        residents=[] if tier is None else [Resident("d", tier, 1, in_use)], **fields,
    ),
    ranks=RANKS,
    waiting=RANKS,
    tier=st.sampled_from([None, "device", "host", "disk", "elsewhere"]),
    in_use=st.integers(0, 1),
    id=st.sampled_from("abcd"),
    epoch=st.sampled_from("12"),
    state=st.sampled_from(["ready", "warming", "draining"]),
    base=st.sampled_from("bc"),
    max_context=COUNTS,
    rank_limit=st.sampled_from([0, 8, 512]),
    queue_limit=COUNTS,
    kv_blocks_free=COUNTS,
    kv_blocks=COUNTS,
    block_tokens=st.sampled_from([1, 16]),
    max_rows=st.sampled_from([0, 1, 2, 32]),
    prompt_tokens_left=COUNTS,
    tightest_tpot=TPOTS,
    adapter_bytes_free=COUNTS,
    adapter_bytes=COUNTS,
    loading_bytes=COUNTS,
    adapter_itemsize=st.sampled_from([0, 2, 4]),
    best_effort=COUNTS,
    strict=st.none() | st.builds(StrictRoom, *[COUNTS] * 6, TPOTS),
    performance=st.none() | MODELS | st.sampled_from(BAD) | MODELS,
    acknowledged=st.lists(st.sampled_from("pqr"), max_size=2),
)  # fmt: skip
DEMANDS = st.builds(
    Demand,
    st.integers(0, 512),
    COUNTS,
    COUNTS,
    st.none() | st.floats(1e-3, 1),
    st.booleans(),
    st.sampled_from(["strict", "standard", "best_effort"]),
)
STEPS = st.lists(
    st.tuples(st.just("put"), RECORDS, st.floats(0, 1e6))
    | st.tuples(st.just("reserve"), st.sampled_from("abcd"), st.sampled_from("pqr"), DEMANDS)
    | st.tuples(st.just("release"), st.sampled_from("abcd"), st.sampled_from("pqr"))
    | st.tuples(st.just("remove"), st.sampled_from("abcd")),
    min_size=1,
    max_size=25,
)


class World:
    """What the table is told, kept plainly."""

    def __init__(self) -> None:
        self.records: dict[str, tuple[ListedRecord, float]] = {}
        self.places: dict[str, dict[str, Demand]] = {}
        self.given: dict[str, int] = {}
        """Places ever given away on the node, since it came."""

    def put(self, record: ListedRecord, heard: float) -> None:
        before, _ = self.records.get(record.id, (record, 0.0))
        if record.id not in self.records or before.epoch != record.epoch:
            self.places[record.id] = {}
        self.given.setdefault(record.id, 0)
        self.records[record.id] = record, heard
        self.places[record.id] = {k: v for k, v in self.places[record.id].items() if k not in record.acknowledged}

    def remove(self, name: str) -> None:
        for known in (self.records, self.places, self.given):
            del known[name]


@given(STEPS)
def test_every_column_is_what_it_is_said_to_be(steps: list[tuple]) -> None:
    table, world = NodeTable(ROWS), World()
    for what, *told in steps:
        if what == "put":
            record, heard = told
            if record.id not in world.records and len(world.records) == ROWS:
                with pytest.raises(IndexError):
                    put_record(table, record, heard)
                continue
            world.put(record, heard)
            put_record(table, record, heard)
        elif told[0] in world.records:
            row = table.row(told[0])
            assert row is not None
            if what == "reserve":
                world.places[told[0]][told[1]] = told[2]
                world.given[told[0]] += 1
                table.reserve(row, told[1], told[2])
            elif what == "release":
                world.places[told[0]].pop(told[1], None)
                table.release(row, told[1])
            else:
                world.remove(told[0])
                table.remove(told[0])
        else:
            table.remove(told[0])  # unknown: nothing happens
        assert len(table) == len(world.records)
        _compare(table, world)


def _compare(table: NodeTable, world: World) -> None:
    rows = {name: row for name in world.records if (row := table.row(name)) is not None}
    assert set(rows) == set(world.records) and list(table.rows()) == sorted(rows.values())
    for name, row in rows.items():
        record, heard = world.records[name]
        held, model = list(world.places[name].values()), _believed(record)
        wanted = _counts(record, held, model) | _seconds(record, held, model)
        strict = _strict(record, held, model, wanted)
        wanted |= {name: (wanted[name], strict[name]) for name in strict if name != "strict_saved"}
        wanted |= {"strict_saved": strict["strict_saved"]}
        wanted |= {"live": True, "last_seen": heard}
        assert wanted.keys() == set(COLUMNS)
        for column, value in wanted.items():
            assert getattr(table, column)[row] == pytest.approx(value, rel=1e-9, abs=1e-15), column
        assert (table.ids[row], table.generation[row]) == (name, world.given[name])
        assert table.reservations(row) == world.places[name]
        assert (table.model_problem(row) is None) == (record.performance is None or model is not ASSUMED)
    _compare_adapter(table, world, rows)
    for row in set(range(ROWS)) - set(rows.values()):
        assert not table.live[row] and not table.ready[row] and table.ids[row] is None
        assert (table.requests[row], table.generation[row], table.reservations(row)) == (0, 0, {})
        assert table.model_problem(row) is None


def _compare_adapter(table: NodeTable, world: World, rows: dict[str, int]) -> None:
    tiers: dict[int, int] = {}
    users: set[int] = set()
    for name, row in rows.items():
        for resident in world.records[name][0].residents:
            if resident.tier != "elsewhere":
                tiers[row] = ["device", "host", "disk"].index(resident.tier)
            if resident.in_use:
                users.add(row)
    assert (table.tiers("d"), table.users("d")) == (tiers, users)


def _believed(record: ListedRecord) -> PerformanceModel:
    told = record.performance
    return ASSUMED if told is None or any(told is bad for bad in BAD) else told


def _decode(model: PerformanceModel, rows: int, contexts: int, ranks: int) -> float:
    decode = model.decode
    costly = rows - decode.flat_rows if rows > decode.flat_rows else 0
    return decode.base + decode.per_row * costly + decode.per_context * contexts + decode.per_rank * ranks


def _prompts(model: PerformanceModel, tokens: int, demands: list[Demand]) -> float:
    """Of what waits before a prompt, and is computed in its pass."""
    tokens += sum(demand.prompt_tokens for demand in demands)
    ranks = sum(demand.prompt_tokens * _counted(demand.rank, model.prefill.padded_rank) for demand in demands)
    return model.prefill.per_token * tokens + model.prefill.per_token_rank * ranks


def _counted(rank: int, padded: int) -> int:
    return 0 if rank == 0 else max(rank, padded)


def _ranks(record: ListedRecord, held: list[Demand], model: PerformanceModel) -> list[int]:
    ranks = [*record.batch_ranks, *record.queued_ranks, *(demand.rank for demand in held)]
    return [_counted(rank, model.decode.padded_rank) for rank in ranks]


def _counts(record: ListedRecord, held: list[Demand], model: PerformanceModel) -> dict[str, float]:
    ranks = _ranks(record, held, model)
    there, waiting = len(ranks), record.queued + len(held)
    beyond = max(4, record.queue_limit // 8)
    return {
        "ready": record.state == "ready",
        "full": waiting >= record.queue_limit,
        "crammed": waiting >= record.queue_limit + beyond,
        "max_context": record.max_context,
        "rank_limit": record.rank_limit or 1 << 53,
        "kv_tokens": record.kv_blocks * record.block_tokens,
        "adapter_itemsize": record.adapter_itemsize,
        "max_rank": max(ranks, default=0),
        "modelled": model is not ASSUMED,
        "requests": there,
        "best_effort": record.best_effort + sum(demand.slo_class == "best_effort" for demand in held),
        "capacity": record.max_rows or math.inf,
        "rows_free": (record.max_rows or math.inf) - there,
    }


def _seconds(record: ListedRecord, held: list[Demand], model: PerformanceModel) -> dict[str, float]:
    ranks, running = _ranks(record, held, model), len(record.batch_ranks)
    adapters = {slot: rank for slot, rank in zip(record.batch_slots, ranks[:running], strict=True) if slot >= 0}
    apart = sum(adapters.values()) + sum(ranks[running:])
    there = len(ranks)
    terms = {"max_rank": there * max(ranks, default=0), "request_ranks": sum(ranks), "adapter_ranks": apart}
    contexts = sum(record.batch_contexts) + record.prompt_tokens_left + sum(demand.prompt_tokens for demand in held)
    kv_room = (record.kv_blocks_free * record.block_tokens) - sum(d.prompt_tokens + d.max_tokens for d in held)
    promises = [record.tightest_tpot, *(demand.tpot for demand in held)]
    # One that is no number, or that nobody could keep alone, keeps nobody out.
    kept = [tpot for tpot in promises if tpot is not None and tpot >= _decode(model, 1, 0, 0)]
    decode, prefill = model.decode, model.prefill
    return {
        "tightest_tpot": min(kept, default=math.inf),
        "kv_room": kv_room if record.kv_blocks else math.inf,
        "decode_there": _decode(model, there, contexts, terms[decode.rank_term]),
        "decode_next_row": decode.per_row if there + 1 > decode.flat_rows else 0.0,
        "prompt_wait": _prompts(model, record.prompt_tokens_left, held),
        "decode_base": decode.base,
        "decode_per_row": decode.per_row,
        "flat_rows": decode.flat_rows,
        "decode_per_context": decode.per_context,
        "decode_per_rank": decode.per_rank,
        "rank_term": RANK_TERMS.index(decode.rank_term),
        "decode_padded_rank": decode.padded_rank,
        "prefill_base": prefill.base,
        "prefill_per_token": prefill.per_token,
        "prefill_per_token2": prefill.per_token2,
        "prefill_per_token_rank": prefill.per_token_rank,
        "prefill_padded_rank": prefill.padded_rank,
        "device_per_byte": 1 / model.to_device.bandwidth,
        "device_wait": model.to_device.latency + record.loading_bytes / model.to_device.bandwidth,
        "store_latency": model.from_store.latency,
        "store_per_byte": 1 / model.from_store.bandwidth,
        "exposed_share": model.exposed_share,
    }


def _strict(
    record: ListedRecord, held: list[Demand], model: PerformanceModel, others: dict[str, float]
) -> dict[str, float]:
    """A node that tells nothing of strict requests treats them as all others."""
    room = record.strict
    if room is None:
        same = {name: others[name] for name in ("rows_free", "kv_room", "prompt_wait")}
        return {**same, "strict_saved": 0.0, "tightest_tpot": math.inf}
    firm = [demand for demand in held if demand.slo_class != "best_effort"]
    step = _decode(model, record.running, room.paused_contexts, 0)
    promised = sum(demand.prompt_tokens + demand.max_tokens for demand in firm)
    tpots = [room.tightest_tpot, *(demand.tpot for demand in firm if demand.slo_class == "strict")]
    alone = _decode(model, 1, 0, 0)
    return {
        "rows_free": room.rows - room.queued - len(firm),
        "kv_room": room.blocks * record.block_tokens - promised if record.kv_blocks else math.inf,
        "prompt_wait": _prompts(model, room.prompt_tokens, [demand for demand in firm if demand.slo_class == "strict"]),
        "strict_saved": step - _decode(model, max(0, record.running - room.paused_rows), 0, 0),
        "tightest_tpot": min((tpot for tpot in tpots if tpot is not None and tpot >= alone), default=math.inf),
    }
