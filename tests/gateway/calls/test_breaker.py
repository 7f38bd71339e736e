"""Circuits: when they open, who may probe, when they close."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Thread
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_gateway import Running, until
from stub_node import echo

from cluster.news import NodeRecord
from cluster.node_table import NodeTable
from gateway.calls.breaker import FIRST_PAUSE_S, MAX_PAUSE_S, THRESHOLD, Breakers, CircuitOpen, Probe
from gateway.scheduling.route import Route, reserve_route

NODE = ("n", "1")
RECORD = NodeRecord(
    id="n", epoch="1", seq=1, url="http://127.0.0.1:1", state="ready", base="b", base_id="base", max_context=100,
    running=0, queued=0, queue_limit=4, kv_blocks_free=10, kv_blocks=10, block_tokens=16,
)  # fmt: skip


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def attempt(breakers: Breakers) -> Probe | None:
    """One that fails."""
    probe = breakers.begin(*NODE)
    breakers.failed(*NODE, probe)
    return probe


def opened(clock: Clock, told: list[str]) -> tuple[Breakers, NodeTable]:
    table = NodeTable(2)
    table.put(RECORD)
    breakers = Breakers(clock, told.append)
    for _ in range(THRESHOLD):
        assert breakers.blocked(table) == frozenset()
        breakers.undecided(*NODE, attempt(breakers))
    return breakers, table


def test_opens_after_failures_in_a_row_and_probes() -> None:
    clock, told = Clock(), list[str]()
    breakers, table = opened(clock, told)
    assert (breakers.blocked(table), breakers.circuit(*NODE), told) == ({"n"}, "open", ["n"])
    breakers.failed(*NODE)  # one that was on its way
    clock.now += FIRST_PAUSE_S
    assert (breakers.blocked(table), breakers.circuit(*NODE)) == (frozenset(), "half_open")
    probe = breakers.begin(*NODE)
    assert breakers.blocked(table) == {"n"}, "one is enough to see"
    breakers.failed(*NODE, probe)
    breakers.undecided(*NODE, probe)
    clock.now += FIRST_PAUSE_S
    assert breakers.circuit(*NODE) == "open", "twice as long"
    clock.now += FIRST_PAUSE_S
    probe = breakers.begin(*NODE)
    breakers.answered(*NODE)
    breakers.undecided(*NODE, probe)
    assert (breakers.blocked(table), breakers.circuit(*NODE), told) == (frozenset(), "closed", ["n"])


def test_a_probe_that_is_given_up_lets_another_try() -> None:
    clock = Clock()
    breakers, table = opened(clock, [])
    clock.now += FIRST_PAUSE_S
    breakers.undecided(*NODE, breakers.begin(*NODE))
    assert breakers.blocked(table) == frozenset()


@given(data=st.data())
def test_there_is_one_probe_at_a_time(data: st.DataObject) -> None:
    """Whatever ends meanwhile of what had begun before."""
    clock = Clock()
    breakers, table = opened(clock, [])
    held: Probe | None = None
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["begin", "wait", "old fails", "old ends", "fails", "ends"])):
            case "begin":
                free = held is None and not breakers.blocked(table)
                try:
                    begun = breakers.begin(*NODE)
                except CircuitOpen:
                    assert not free
                else:
                    assert free and begun is not None
                    held = begun
            case "wait":
                clock.now += MAX_PAUSE_S
            case "old fails":
                breakers.failed(*NODE)
            case "old ends":
                breakers.undecided(*NODE, None)
            case "fails" if held is not None:
                breakers.failed(*NODE, held)
                held = None
                assert breakers.circuit(*NODE) == "open"
            case "ends" if held is not None:
                breakers.undecided(*NODE, held)
                held = None
        assert held is None or breakers.blocked(table) == {"n"}


CALLERS = 8


class Mute:
    """Takes connections and says nothing."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.taken: list[socket.socket] = []
        Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                self.taken.append(self.listener.accept()[0])

    def hang_up(self) -> None:
        self.listener.close()
        for connection in self.taken:
            connection.close()


def test_one_of_many_callers_probes(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told at once to try again, while it waits for the node. To route a call takes its time, as with
    Redis: all have chosen the node before the first one begins."""
    ahead, chosen, all_have_chosen = 0.0, 0, asyncio.Event()

    async def slow_route(*args: Any) -> Route:
        nonlocal chosen
        route = await reserve_route(*args)
        chosen += 1
        if chosen == THRESHOLD + CALLERS:
            all_have_chosen.set()
        if chosen > THRESHOLD:
            await all_have_chosen.wait()
        return route

    monkeypatch.setattr("gateway.calls.routing.reserve_route", slow_route)
    monkeypatch.setattr("gateway.traffic.monotonic", lambda: time.monotonic() + ahead)
    running = start()
    node, client = running.node(), running.client()
    assert node.publish(running.url, url="http://127.0.0.1:9").status_code == 204
    for _ in range(THRESHOLD):
        assert client.post("/invoke/stories260K", json={"prompt": "x"}).status_code == 502
    mute = Mute()
    assert node.publish(running.url, url=mute.url).status_code == 204
    ahead = FIRST_PAUSE_S
    with ThreadPoolExecutor(CALLERS) as pool:
        calls = [pool.submit(client.post, "/invoke/stories260K", json={"prompt": "x"}) for _ in range(CALLERS)]
        until(lambda: bool(mute.taken) and sum(call.done() for call in calls) >= CALLERS - 1)
        mute.hang_up()
        statuses = sorted(call.result(60).status_code for call in calls)
    assert (statuses, len(mute.taken)) == ([502] + (CALLERS - 1) * [503], 1)


def test_pauses_are_bounded_and_an_answer_in_between_begins_anew() -> None:
    clock = Clock()
    breakers, table = opened(clock, [])
    for _ in range(20):
        clock.now += MAX_PAUSE_S
        assert breakers.blocked(table) == frozenset()
        attempt(breakers)
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
