"""What a request takes up of a node, against the cost model itself: a full batch takes what its steps take."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.node_table import Demand, NodeTable
from cluster.performance_model import DecodeModel, ModelKey, PerformanceModel, PrefillModel, Transfer
from gateway.scheduling.request import RoutingRequest
from gateway.scheduling.work import rows_together, work
from tests.support.listed_record import ListedRecord, put_record

small = st.floats(1e-6, 1e-2)
MODEL = PerformanceModel(
    key=ModelKey(hardware="cpu", base="", dtype="", kernel="", garnish=""),
    decode=DecodeModel(base=0.02, per_row=1e-3, per_context=1e-6, per_rank=1e-5, rank_term="request_ranks"),
    prefill=PrefillModel(base=0.01, per_token=1e-4, per_token2=1e-8, per_token_rank=1e-7),
    to_device=Transfer(latency=0.0, bandwidth=1e9),
    from_store=Transfer(latency=0.0, bandwidth=1e9),
)
RECORD = ListedRecord(
    id="a", epoch="1", seq=1, url="http://127.0.0.1:1", state="ready", base="b", base_id="base", max_context=4096,
    running=0, queued=0, queue_limit=64, kv_blocks_free=4096, kv_blocks=4096, block_tokens=16, max_rows=8,
    performance=MODEL,
)  # fmt: skip


def taken(record: ListedRecord, request: RoutingRequest) -> float | None:
    nodes = NodeTable(2)
    return work(nodes, put_record(nodes, record), request)


def request(prompt: int = 100, answer: int = 50, rank: int = 0) -> RoutingRequest:
    return RoutingRequest("r", Demand(rank, prompt, answer), None, 0, expected_tokens=float(answer))


@given(
    decode=st.builds(DecodeModel, base=small, per_row=small, per_context=small, per_rank=small,
                     rank_term=st.just("request_ranks"), flat_rows=st.integers(0, 40)),
    prefill=st.builds(PrefillModel, base=small, per_token=small, per_token2=small, per_token_rank=small),
    prompt=st.integers(1, 500), answer=st.integers(1, 500), rank=st.integers(0, 64), rows=st.integers(1, 32),
)  # fmt: skip
def test_a_full_batch_takes_what_its_passes_take(
    decode: DecodeModel, prefill: PrefillModel, prompt: int, answer: int, rank: int, rows: int
) -> None:
    model = msgspec.structs.replace(MODEL, decode=decode, prefill=prefill)
    record = msgspec.structs.replace(RECORD, performance=model, max_rows=rows)
    step = decode.seconds(rows, 0, rows * rank) + rows * decode.per_context * (prompt + answer / 2)
    first = prefill.seconds(prompt, prompt * prompt, prompt * rank)
    found = taken(record, request(prompt, answer, rank))
    assert found is not None and rows * found == pytest.approx(rows * first + answer * step)


def test_kv_memory_may_hold_fewer_than_there_are_rows() -> None:
    little = msgspec.structs.replace(RECORD, kv_blocks=300 // 16 + 1)  # two requests of 150 tokens
    spacious, tight = taken(RECORD, request()), taken(little, request())
    assert spacious is not None and tight is not None
    assert tight - spacious == pytest.approx(50 * 0.02 * (150 / little.kv_blocks / 16 - 1 / 8))


def test_forecasts_that_proved_wrong_are_corrected_within_bounds() -> None:
    once = taken(RECORD, request())
    assert once is not None
    for told, believed in ((2.0, 2.0), (0.5, 0.5), (1e9, 10.0), (0.0, 0.1), (float("nan"), 1.0)):
        assert taken(msgspec.structs.replace(RECORD, forecast_ratio=told), request()) == pytest.approx(once * believed)


def test_of_a_node_that_was_never_measured_nothing_is_known() -> None:
    assert taken(msgspec.structs.replace(RECORD, performance=None), request()) is None


@pytest.mark.parametrize(
    ("told", "together"),
    [
        ({"kv_blocks": 0}, 8),
        ({"kv_blocks": 0, "max_rows": 0}, 1),
        ({"max_rows": 0}, 4096 * 16 / 150),
        ({"kv_blocks": 1}, 1),
    ],
    ids=["memory unknown", "nothing known", "rows unknown", "memory for less than one"],
)
def test_what_is_not_known_bounds_nothing_and_one_always_runs(told: dict[str, int], together: float) -> None:
    nodes = NodeTable(2)
    row = put_record(nodes, msgspec.structs.replace(RECORD, **told))
    assert rows_together(nodes.load(row), 150.0) == pytest.approx(together)
    found = work(nodes, row, request())
    prefill = MODEL.prefill.seconds(100, 100 * 100, 0)
    assert found == pytest.approx(prefill + 50 * (0.02 / together + 1e-3 + 125 * 1e-6))
