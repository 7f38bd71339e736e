"""Circuits: when they open, who may probe, when they close."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from running_gateway import Running
from stub_node import echo

from cluster.messages import NodeRecord
from cluster.node_table import NodeTable
from gateway.breaker import FIRST_PAUSE, LONGEST_PAUSE, THRESHOLD, Breakers

NODE = ("n", "1")
RECORD = NodeRecord(
    id="n", epoch="1", seq=1, url="http://127.0.0.1:1", state="ready", base="b", base_id="base", max_context=100,
    running=0, queued=0, queue_limit=4, kv_blocks_free=10, kv_blocks=10, block_tokens=16,
)  # fmt: skip


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, told: list[str]) -> tuple[Breakers, NodeTable]:
    table = NodeTable(2)
    table.put(RECORD)
    breakers = Breakers(clock, told.append)
    for _ in range(THRESHOLD):
        assert breakers.blocked(table) == frozenset()
        breakers.begin(*NODE)
        breakers.failed(*NODE)
        breakers.undecided(*NODE)
    return breakers, table


def test_opens_after_failures_in_a_row_and_probes() -> None:
    clock, told = Clock(), list[str]()
    breakers, table = opened(clock, told)
    assert (breakers.blocked(table), breakers.circuit(*NODE), told) == ({"n"}, "open", ["n"])
    breakers.failed(*NODE)  # one that was on its way
    clock.now += FIRST_PAUSE
    assert (breakers.blocked(table), breakers.circuit(*NODE)) == (frozenset(), "half_open")
    breakers.begin(*NODE)
    assert breakers.blocked(table) == {"n"}, "one is enough to see"
    breakers.failed(*NODE)
    breakers.undecided(*NODE)
    clock.now += FIRST_PAUSE
    assert breakers.circuit(*NODE) == "open", "twice as long"
    clock.now += FIRST_PAUSE
    breakers.begin(*NODE)
    breakers.answered(*NODE)
    breakers.undecided(*NODE)
    assert (breakers.blocked(table), breakers.circuit(*NODE), told) == (frozenset(), "closed", ["n"])


def test_a_probe_that_is_given_up_lets_another_try() -> None:
    clock = Clock()
    breakers, table = opened(clock, [])
    clock.now += FIRST_PAUSE
    breakers.begin(*NODE)
    breakers.undecided(*NODE)
    assert breakers.blocked(table) == frozenset()


def test_pauses_are_bounded_and_an_answer_in_between_begins_anew() -> None:
    clock = Clock()
    breakers, table = opened(clock, [])
    for _ in range(20):
        clock.now += LONGEST_PAUSE
        assert breakers.blocked(table) == frozenset()
        breakers.failed(*NODE)
    breakers.answered(*NODE)
    breakers.failed(*NODE)
    assert breakers.circuit(*NODE) == "closed"


def test_a_new_process_is_another_node() -> None:
    clock = Clock()
    breakers, table = opened(clock, [])
    table.put(msgspec.structs.replace(RECORD, epoch="2"))
    assert breakers.blocked(table) == frozenset()
    assert breakers._failing == {}


def test_a_node_that_is_gone_is_left_alone(start: Callable[..., Running]) -> None:
    """It still reports, as if only the way to it were cut."""
    running = start()
    gone = running.node(echo, "a-gone")
    url = gone.url
    good = running.node(echo, "b-good")
    assert gone.publish(running.url, url="http://127.0.0.1:9").status_code == 204
    client, admin = running.client(), running.client("admin")
    for _ in range(THRESHOLD + 2):
        reply = client.post("/invoke/stories260K", json={"prompt": "x", "max_tokens": 2})
        assert (reply.status_code, reply.headers["x-garnish-node"]) == (200, "b-good")
    assert len(good.received) == THRESHOLD + 2
    assert {node["record"]["id"]: node["circuit"] for node in admin.get("/nodes").json()["nodes"]} in (
        {"a-gone": "open", "b-good": "closed"},
        {"a-gone": "half_open", "b-good": "closed"},
    )
    assert 'garnish_circuits_opened_total{node="a-gone"} 1.0' in admin.get("/metrics").text
    good.publish(running.url, state="draining")
    assert gone.publish(running.url, url=url, epoch="2").status_code == 204
    assert client.post("/invoke/stories260K", json={"prompt": "x"}).headers["x-garnish-node"] == "a-gone"
