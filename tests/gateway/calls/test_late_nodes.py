"""Nodes whose records come too late: they are asked before a call is refused, and serve it if they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from running_gateway import Running, until
from stub_node import StubNode

from gateway.calls import late_nodes

CALL: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
EXPIRY = 0.5


def is_late(running: Running) -> bool:
    """Whether all records have expired."""
    return not running.client("admin").get("/nodes").json()["nodes"]


@contextmanager
def answering(node: StubNode) -> Iterator[None]:
    """Lets the node answer at the end, also after a failure."""
    try:
        yield
    finally:
        node.answer_after.set()


@pytest.fixture
def running(start: Callable[..., Running]) -> Running:
    """A gateway with one node whose record has expired."""
    made = start(record_expiry=EXPIRY)
    made.node()
    until(lambda: is_late(made))
    return made


def test_a_late_node_that_answers_serves_the_call(running: Running) -> None:
    [node], client = running.nodes, running.client()
    for asked in range(1, 4):
        assert client.post("/invoke/stories260K", json=CALL).status_code == 200
        assert node.asked == asked
        until(lambda: is_late(running))


def test_calls_at_the_same_time_wait_for_one_answer(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_nodes, "ASK_SECONDS", 60.0)
    [node], client, admin = running.nodes, running.client(), running.client("admin")
    node.answer_after.clear()
    with ThreadPoolExecutor(8) as pool, answering(node):
        calls = [pool.submit(client.post, "/invoke/stories260K", json=CALL) for _ in range(8)]
        until(lambda: "garnish_open_invocations 8.0" in admin.get("/metrics").text and node.asked > 0)
        assert node.asked == 1
        node.answer_after.set()
        replies = [call.result() for call in calls]
    assert [reply.status_code for reply in replies] == [200] * 8


def test_readiness_and_warming_ask_late_nodes_too(running: Running, pirate: dict[str, Any]) -> None:
    client = running.client()
    assert client.get("/readyz").status_code == 200
    assert client.post("/deploy/f", files=pirate).status_code == 201
    until(lambda: is_late(running))
    assert client.post("/functions/f/warm").status_code in (200, 202)


def test_a_node_that_is_gone_is_asked_once_a_second(running: Running) -> None:
    [node], client = running.nodes, running.client()
    node.answers = False
    began = time.monotonic()
    replies = [client.post("/invoke/stories260K", json=CALL) for _ in range(20)]
    assert {reply.status_code for reply in replies} == {503}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
    assert node.asked <= 1 + (time.monotonic() - began) / late_nodes.PAUSE_SECONDS


def test_a_node_that_hangs_is_waited_for_within_a_bound(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_nodes, "ASK_SECONDS", 0.2)
    [node] = running.nodes
    node.answer_after.clear()
    with answering(node):
        reply = running.client().post("/invoke/stories260K", json=CALL)
    assert (reply.status_code, reply.json()["error"]["type"]) == (503, "unavailable")


@pytest.mark.parametrize("state", ["draining", "warming"])
def test_a_late_node_that_is_not_ready_gets_no_call(running: Running, state: str) -> None:
    [node] = running.nodes
    node.state = state
    assert running.client().post("/invoke/stories260K", json=CALL).status_code == 503
    assert not node.received


def test_another_node_at_the_address_is_not_taken_for_the_late_one(running: Running) -> None:
    [node] = running.nodes
    node.node_id = "another"
    assert running.client().post("/invoke/stories260K", json=CALL).status_code == 503
    assert not node.received


def test_a_node_that_drains_was_not_late(start: Callable[..., Running]) -> None:
    running = start(record_expiry=EXPIRY)
    node: StubNode = running.node(publish=False)
    assert isinstance(node.publish(running.url, "draining"), httpx.Response)
    until(lambda: is_late(running))
    assert running.client().post("/invoke/stories260K", json=CALL).status_code == 503
    assert node.asked == 0
