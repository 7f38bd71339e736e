from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.frames import Frames
from cluster.messages import (
    PROTOCOL_VERSION,
    Adapter,
    ColdStart,
    Done,
    Event,
    Failed,
    GenerateRequest,
    NodeRecord,
    Resident,
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
    request = GenerateRequest(
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
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request
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
        residents=[Resident(digest="d", tier="host", bytes=1, in_use=2)],
        acknowledged=["i"],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=NodeRecord) == record


def test_fields_of_a_later_version_are_ignored() -> None:
    """So that a newer peer may add fields without breaking this one."""
    told = msgspec.to_builtins(Started(node="n", cold_start="none")) | {"new_field": 1}
    assert decode_event(msgspec.msgpack.encode(told)) == Started(node="n", cold_start="none")


def test_versions() -> None:
    check_version(PROTOCOL_VERSION)
    with pytest.raises(VersionMismatch, match="99"):
        check_version(99)
