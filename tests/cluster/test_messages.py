from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.frames import Frames
from cluster.gpu import GpuLoad
from cluster.messages import (
    PROTOCOL_VERSION,
    Adapter,
    ColdStart,
    Done,
    Event,
    Failed,
    GenerateRequest,
    Sampling,
    Started,
    Timing,
    Token,
    TokenLogprob,
    TopLogprob,
    VersionMismatch,
    check_version,
    decode_event,
    encode_event,
)
from cluster.news import (
    Changes,
    Heartbeat,
    NodeRecord,
    NodeReport,
    Resident,
    StrictRoom,
    VllmLoad,
    full_report,
    record_from,
)
from cluster.received import WINDOW, Received
from cluster.residency import EvictOrder, Moved, WantedResidency

SECONDS = st.floats(0, 1e6)
COLD = st.builds(ColdStart, st.text(), st.text(), SECONDS, SECONDS)
TOP = st.builds(TopLogprob, st.text(), st.integers(0, 2**31), st.floats(-100, 0))
LOGPROB = st.builds(TokenLogprob, st.text(), st.integers(0, 2**31), st.floats(-100, 0), st.lists(TOP, max_size=2))
COUNT = st.integers(0, 2**40)
EVENTS = st.one_of(
    st.builds(Started, node=st.text(), cold_start=st.text()),
    st.builds(Token, text=st.text(), token_ids=st.lists(COUNT), index=COUNT, logprobs=st.lists(LOGPROB, max_size=2)),
    st.builds(
        Done,
        finish_reason=st.text(),
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        cached_tokens=COUNT,
        timing=st.builds(Timing, SECONDS, SECONDS, SECONDS, COLD),
        text=st.text(),
    ),
    st.builds(Failed, type=st.text(), message=st.text(), retryable=st.booleans(), retry_after=st.none() | SECONDS),
)

REQUEST = GenerateRequest(
    id="i",
    base="b",
    tenant="t",
    token_ids=[1, 2],
    max_tokens=3,
    sampling=Sampling(temperature=0.0, seed=2**63 - 1, logprobs=0),
    timeout=1.5,
    adapter=Adapter(digest="d", artifact="a/b", bytes=10, ranks=(4, 8)),
    stop=["x"],
)


@given(st.lists(EVENTS, max_size=5))
def test_events_come_back(events: list[Event]) -> None:
    stream = b"".join(encode_event(event) for event in events)
    assert [decode_event(body) for body in Frames().feed(stream)] == events


@given(st.binary(max_size=100))
def test_garbage_is_a_decode_error(body: bytes) -> None:
    try:
        decode_event(body)
    except msgspec.DecodeError:
        return


def test_requests_and_records_come_back() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(REQUEST), type=GenerateRequest) == REQUEST
    record = NodeRecord(
        id="n",
        epoch="e",
        seq=1,
        url="http://h:1",
        state="ready",
        base="b",
        base_id="base",
        max_context=10,
        running=1,
        queued=2,
        queue_limit=3,
        kv_blocks_free=4,
        kv_blocks=5,
        block_tokens=6,
    )
    news = full_report(record, [Resident(digest="d", tier="host", bytes=1, in_use=2)], 7)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(news), type=NodeReport)
    assert decoded == news and decoded.facts is not None
    assert record_from(decoded.heartbeat, decoded.facts) == record


def test_news_are_small_however_much_a_node_does() -> None:
    most = (1 << 53) - 1
    room = StrictRoom(*[most] * 6, 0.123456)
    received = Received(most, b"\xff" * 32)
    heartbeat = Heartbeat(
        id="node-eu-west-1-0123456789abcdef.example", epoch="0123456789abcdef", seq=most, state="draining",
        running=10_000, queued=10_000, kv_blocks_free=most, contexts=most, max_rank=512, request_ranks=most,
        adapter_ranks=most, prompt_tokens_left=most, tightest_tpot=0.0123, strict=room, loading_bytes=most,
        adapter_bytes_free=most, forecast_ratio=1.0123, measuring=0.123, received=received, prefetches=2,
        prefetch_useful_bytes=most, prefetch_late_bytes=most, prefetch_wasted_bytes=most,
        gpu_load=GpuLoad(1 << 40, 100, 1200, 120, 0x7FF), best_effort=10_000,
        vllm=VllmLoad(10_000, 10_000, 0.1234, 1 << 32),
    )  # fmt: skip
    assert len(msgspec.msgpack.encode(NodeReport(heartbeat, None, Changes(most, most)))) <= 400


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=400), st.integers(1, 1 << 50))
def test_which_places_became_requests(steps: list[tuple[int, int]], first: int) -> None:
    """Requests come nearly in the order of their numbers; some never come."""
    received, came, number = Received(), set(), first
    for forth, back in steps:
        number += forth
        one = max(first, number - back)
        received = received.with_one(one)
        came.add(one)
    for one in range(max(first, received.last - WINDOW + 1), received.last + 5):
        assert received.has(one) == (one in came)
    assert len(received.bits) <= WINDOW // 8
    assert received.last <= WINDOW or received.has(received.last - WINDOW), "what is older has come, or never will"
    assert not received.has(0)


def test_fields_of_a_later_version_are_ignored() -> None:
    """So that a newer peer may add fields without breaking this one."""
    told = msgspec.to_builtins(Started(node="n", cold_start="none")) | {"new_field": 1}
    assert decode_event(msgspec.msgpack.encode(told)) == Started(node="n", cold_start="none")


@pytest.mark.parametrize("v", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_an_older_or_newer_version_is_refused(v: int) -> None:
    check_version(PROTOCOL_VERSION)
    with pytest.raises(VersionMismatch, match=f"message version {v} is not supported; supported: {PROTOCOL_VERSION}"):
        check_version(v)


@pytest.mark.parametrize("message", [REQUEST, WantedResidency([], 1.0), EvictOrder("d"), Moved("d", None)])
def test_every_message_is_sent_with_its_version(message: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message))["v"] == PROTOCOL_VERSION
