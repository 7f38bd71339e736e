"""Nodes that hang, each in another way: a request without a token goes to another node, with the same seed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from running_gateway import Running, until
from stub_node import StubNode, echo, hang_after_first, hang_before_first

from cluster.state import MemoryClusterState
from gateway.calls import node_watch

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


class Clock:
    """Of what the gateway knows of its nodes, and of the watch over those that have streams. Stands still but for the
    test; the watch looks again and again meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        self._looks = 0
        monkeypatch.setattr("gateway.shared_state.monotonic", self)
        monkeypatch.setattr(node_watch, "time", SimpleNamespace(monotonic=self))
        monkeypatch.setattr(node_watch, "TICK_S", 0.01)
        silence = MemoryClusterState.seconds_since_report

        async def noted(state: MemoryClusterState, node_id: str, epoch: str) -> float:
            self._looks += 1
            return await silence(state, node_id, epoch)

        monkeypatch.setattr(MemoryClusterState, "seconds_since_report", noted)

    def __call__(self) -> float:
        return self.now

    def until_looked(self) -> None:
        """It has looked at its node from now on."""
        before = self._looks
        until(lambda: self._looks >= before + 2)


def until_begun(running: Running) -> None:
    """The gateway has heard that the call has begun on its node."""
    admin = running.client("admin")

    def waits() -> list[tuple[int, float]]:
        return [(pool["open_requests"], pool["queue_wait"]) for pool in admin.get("/pools").json()["pools"]]

    until(lambda: waits() == [(1, 0.0)])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_node_that_falls_silent_before_the_first_token(start: Callable[..., Running], clock: Clock) -> None:
    """Its connection lives, and its records have stopped: as long as there is another node, nobody waits for it."""
    running = start(record_expiry=4.0, node_silence=600.0)
    hung = running.node(hang_before_first, "a-hung", answers=False)
    good = running.node(echo, "b-good", publish=False)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(served_by_the_other, running, hung, good)
        until_begun(running)
        clock.now += 3.9
        assert good.publish(running.url).status_code == 204
        clock.until_looked()
        assert not call.done()
        clock.now += 0.2
        call.result(60)
    assert hung.disconnected.wait(30), "it is told that nobody waits any more"


def test_without_another_node_a_silent_one_gets_its_time(start: Callable[..., Running], clock: Clock) -> None:
    running = start(record_expiry=3.0, node_silence=600.0)
    node = running.node(hang_before_first, answers=False)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(running.client().post, PATH, json=CALL)
        until_begun(running)
        clock.now += 3.1
        assert running.client("admin").get("/nodes").json()["nodes"] == []
        clock.until_looked()
        assert not call.done()
        node.go_on.set()
        assert call.result(60).status_code == 200


def test_a_stream_that_has_begun_leaves_a_silent_node(start: Callable[..., Running], clock: Clock) -> None:
    running = start(record_expiry=12.0, node_silence=4.0)
    running.node(hang_after_first, "a-hung", answers=False)
    other = running.node(echo, "b-other", publish=False)
    with running.client().stream("POST", PATH, json={**CALL, "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: token"
        assert other.publish(running.url).status_code == 204
        clock.now += 3.9
        clock.until_looked()
        assert other.received == []
        clock.now += 0.2
        told = "\n".join(lines)
    assert "event: error" not in told and '"resumed":1' in told
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
