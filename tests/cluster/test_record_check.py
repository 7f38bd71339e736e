"""Records that contradict themselves or their sender."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import Clock, news

from cluster.news import Changes, NodeReport, StrictRoom, VllmLoad
from cluster.received import Received
from cluster.record_check import RECORDS_PER_SECOND, BadRecord, RecordRates, check_news


def told(**changed: Any) -> NodeReport:
    """Fields of Heartbeat, Facts and Changes."""
    first = news()
    assert first.facts is not None

    def part(known: Any) -> Any:
        fields = {name: value for name, value in changed.items() if name in known.__struct_fields__}
        return msgspec.structs.replace(known, **fields)

    return NodeReport(part(first.heartbeat), part(first.facts), part(first.changes))


def test_what_is_right_is_believed() -> None:
    check_news(told(tightest_tpot=0.1), "127.0.0.1", ())
    check_news(told(base="", state="warming"), "127.0.0.1", ())
    check_news(NodeReport(told().heartbeat, None, Changes(3, 3)), "10.0.0.9", ())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"id": ""}, "id"),
        ({"id": "a b"}, "id"),
        ({"id": "a" * 254}, "id"),
        ({"epoch": ""}, "epoch"),
        ({"state": "asleep"}, "state"),
        ({"running": -1}, "running"),
        ({"queue_limit": 1 << 60}, "queue_limit"),
        ({"request_ranks": -8}, "request_ranks"),
        ({"strict": StrictRoom(rows=-1)}, "strict.rows"),
        ({"vllm": VllmLoad(waiting=-1)}, "vllm.waiting"),
        ({"strict": StrictRoom(tightest_tpot=math.nan)}, "strict.tightest_tpot"),
        ({"tightest_tpot": math.nan}, "tightest_tpot"),
        ({"tightest_tpot": 0.0}, "tightest_tpot"),
        ({"pool": "Not A Pool"}, "pool"),
        ({"received": Received(-1)}, "received.last"),
        ({"received": Received(1, b"x" * 33)}, "received"),
        ({"since": -2}, "changes"),
        ({"since": 5, "at": 4}, "changes"),
        ({"at": 1 << 60}, "changes"),
    ],
)
def test_what_can_not_be(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRecord, match=f"^{why}"):
        check_news(told(**changed), "127.0.0.1", ())


@pytest.mark.parametrize(
    ("url", "peer", "allowed"),
    [
        ("http://10.0.0.7:81", "10.0.0.7", ()),
        ("http://10.0.0.7:81/", "::ffff:10.0.0.7", ()),
        ("http://[fe80::1]:81", "fe80:0::1", ()),
        ("https://nodes.example:81", "10.0.0.7", ("nodes.example",)),
    ],
)
def test_urls_of_the_sender(url: str, peer: str, allowed: tuple[str, ...]) -> None:
    check_news(told(url=url), peer, allowed)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.8:81",
        "http://evil.example:81",
        "http://10.0.0.7@evil.example",
        "http://10.0.0.7:81/admin",
        "http://10.0.0.7:81?x=1",
        "ftp://10.0.0.7",
        "10.0.0.7:81",
        "http://[10.0.0.7:81",
        "http://10.0.0.7:port",
        "http://10.0.0.7:99999",
        "http://10.0.0.7:0",
        "",
    ],
)
def test_urls_of_others(url: str) -> None:
    with pytest.raises(BadRecord, match=r"^url"):
        check_news(told(url=url), "10.0.0.7", ("nodes.example",))


def test_a_flood_of_what_are_no_ids_takes_no_memory() -> None:
    rates = RecordRates(Clock())
    with pytest.raises(BadRecord, match=r"^id"):
        rates.allows("a" * 1_000_000)
    assert not rates._buckets


@given(st.lists(st.floats(0, 0.1), max_size=300))
def test_a_flood_is_bounded(gaps: list[float]) -> None:
    clock = Clock()
    rates = RecordRates(clock)
    begin, taken = clock.now, 0
    for gap in gaps:
        clock.now += gap
        taken += rates.allows("a")
    assert taken <= RECORDS_PER_SECOND * (clock.now - begin + 2) + 1
    assert rates.allows("another")
