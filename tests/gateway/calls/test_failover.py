"""Nodes that hang, each in another way: a request without a token goes to another node, with the same seed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from running_gateway import Running
from stub_node import StubNode, echo, hang_after_first, hang_before_first
from test_gateway_restart import publishing

CALL = {"prompt": "x", "max_tokens": 3}
PATH = "/invoke/stories260K"


def served_by_the_other(running: Running, hung: StubNode, good: StubNode) -> None:
    reply = running.client().post(PATH, json=CALL)
    assert (reply.status_code, reply.headers["x-garnish-node"]) == (200, good.node_id)
    if hung.received:
        assert hung.received[0].sampling.seed == good.received[0].sampling.seed
    admin = running.client("admin")
    assert all(
        node["reserved"] == 0 for node in admin.get("/nodes").json()["nodes"] if node["record"]["id"] != "b-good"
    )
    assert "garnish_retries_total 1.0" in admin.get("/metrics").text


def test_a_node_that_accepts_and_says_nothing(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records still come."""
    monkeypatch.setattr("gateway.calls.node_client.ANSWER_SECONDS", 2.0)
    running = start()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        hung = running.node(echo, "a-hung", publish=False)
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert hung.publish(running.url, url=url).status_code == 204
        served_by_the_other(running, hung, running.node(echo, "b-good"))


def test_a_node_that_falls_silent_before_the_first_token(start: Callable[..., Running]) -> None:
    """Its connection lives, and its records have stopped: as long as there is another node, nobody waits for it."""
    running = start(record_expiry=4.0, node_silence=600.0)
    hung = running.node(hang_before_first, "a-hung")
    good = running.node(echo, "b-good", publish=False)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(served_by_the_other, running, hung, good)
        assert hung.began.wait(30)
        with publishing(good, running.url):
            call.result(60)
    assert hung.disconnected.wait(30), "it is told that nobody waits any more"


def test_without_another_node_a_silent_one_gets_its_time(start: Callable[..., Running]) -> None:
    running = start(record_expiry=3.0, node_silence=600.0)
    node = running.node(hang_before_first)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(running.client().post, PATH, json=CALL)
        assert node.began.wait(30)
        admin = running.client("admin")
        while admin.get("/nodes").json()["nodes"]:
            assert not call.done()
        with pytest.raises(TimeoutError):
            call.result(1.0)
        node.go_on.set()
        assert call.result(60).status_code == 200


def test_a_stream_that_has_begun_leaves_a_silent_node(start: Callable[..., Running]) -> None:
    running = start(record_expiry=12.0, node_silence=4.0)
    node = running.node(hang_after_first, "a-hung")
    other = running.node(echo, "b-other", publish=False)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(running.client().post, PATH, json={**CALL, "stream": True})
        assert node.began.wait(30)
        with publishing(other, running.url):
            reply = call.result(60)
    assert "event: error" not in reply.text and '"resumed":1' in reply.text
    assert [asked.generated for asked in other.received] == [[100]]


@pytest.mark.parametrize(
    "told",
    [{"url": "http://127.0.0.2:9"}, {"url": "http://evil.example"}, {"running": -1}, {"id": "../n"}],
)
def test_records_that_are_not_believed(start: Callable[..., Running], told: dict) -> None:
    running = start()
    node = running.node(publish=False)
    reply = node.publish(running.url, **told)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request")
    assert running.client("admin").get("/nodes").json()["nodes"] == []


def test_hosts_that_the_operator_names_are_believed(start: Callable[..., Running]) -> None:
    running = start(node_hosts=("nodes.example",))
    assert running.node(publish=False).publish(running.url, url="http://nodes.example:1").status_code == 204


def test_a_flood_of_records_is_refused(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.record_check.RECORDS_PER_SECOND", 0.01)
    monkeypatch.setattr("cluster.record_check.BURST_SECONDS", 300.0)
    running = start()
    node, other = running.node(publish=False), running.node(publish=False)
    assert [node.publish(running.url).status_code for _ in range(5)] == [204, 204, 204, 429, 429]
    assert other.publish(running.url).status_code == 204
