"""Nodes that refuse, die or fall silent; callers that go."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import httpx_sse
import pytest
from running_gateway import Running
from stub_node import (
    StubNode,
    die_after_first,
    die_at_once,
    echo,
    garbage,
    hang_after_first,
    hang_before_first,
    refuse,
    refuse_for_good,
    stub_node,
)

CALL = {"prompt": "x", "max_tokens": 3}
PATH = "/invoke/stories260K"


def error_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["type"]


@pytest.fixture
def nobody_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that has just begun waits for nodes to report but for a moment."""
    monkeypatch.setattr("gateway.calls.dispatch.RECORD_EXPIRY", 0.05)


@pytest.fixture
def quickly_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that send no more, and may be gone."""
    monkeypatch.setattr("gateway.http.protocol.PROBE_SECONDS", (0.05, 0.05, 0.1))


@pytest.mark.usefixtures("nobody_else_comes")
def test_no_node(start: Callable[..., Running]) -> None:
    client = start().client()
    reply = client.post(PATH, json=CALL)
    assert error_of(reply) == (503, "unavailable")
    assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("record", [{"state": "warming"}, {"state": "draining"}, {"base": "0" * 64}])
def test_nodes_that_may_not_serve(start: Callable[..., Running], record: dict) -> None:
    running = start()
    running.node(**record)
    assert error_of(running.client().post(PATH, json=CALL)) == (503, "unavailable")
    assert running.nodes[0].received == []


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_calls_may_be_tried_again_while_a_node_warms(start: Callable[..., Running], path: str) -> None:
    """Its record tells a context of 0 until the engine is there."""
    running = start()
    node = running.node(state="warming")
    running.node(node_id="other", base="0" * 64, max_context=1)
    client = running.client()
    call = CALL | ({"model": "stories260K"} if path != PATH else {})
    reply = client.post(path, json=call)
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    node.publish(running.url)
    assert client.post(path, json=call).status_code == 200


def test_all_queues_full(bare: Running) -> None:
    running = bare
    running.node(queued=64)
    reply = running.client().post(PATH, json=CALL)
    assert error_of(reply) == (429, "overloaded")
    assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.usefixtures("nobody_else_comes")
def test_expired_nodes_get_nothing(start: Callable[..., Running]) -> None:
    running = start(record_expiry=0.0)
    running.node()
    assert error_of(running.client().post(PATH, json=CALL)) == (503, "unavailable")


@pytest.mark.parametrize("script", [refuse, die_at_once, garbage])
def test_a_second_node_takes_over_with_the_same_seed(bare: Running, script: object) -> None:
    running = bare
    bad = running.node(script, "a-bad")  # the less id is chosen first
    good = running.node(echo, "b-good")
    reply = running.client().post(PATH, json=CALL)
    assert reply.status_code == 200
    assert reply.headers["x-garnish-node"] == "b-good"
    assert bad.received[0].sampling.seed == good.received[0].sampling.seed
    assert bad.received[0].token_ids == good.received[0].token_ids


def test_a_node_that_is_gone_is_passed_over(start: Callable[..., Running]) -> None:
    running = start()
    gone = StubNode("a-gone", running.base.fingerprint, running.secret, 512, echo)
    with stub_node(gone):
        assert gone.publish(running.url).status_code == 204
    running.node(echo, "b-good")
    assert running.client().post(PATH, json=CALL).headers["x-garnish-node"] == "b-good"


def test_only_one_retry(bare: Running) -> None:
    running = bare
    nodes = [running.node(refuse, f"n{index}") for index in range(3)]
    assert error_of(running.client().post(PATH, json=CALL)) == (503, "unavailable")
    assert sum(len(node.received) for node in nodes) == 2


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (refuse, (503, "unavailable")),
        (refuse_for_good, (422, "validation_failed")),
        (die_at_once, (502, "node_failed")),
        (garbage, (502, "node_failed")),
    ],
)
def test_the_only_node_fails(bare: Running, script: object, expected: tuple[int, str]) -> None:
    running = bare
    running.node(script)
    client = running.client()
    assert error_of(client.post(PATH, json=CALL)) == expected
    assert error_of(client.post(PATH, json={**CALL, "stream": True})) == expected


def test_node_dies_mid_stream(bare: Running) -> None:
    running = bare
    node = running.node(die_after_first, "a-dies")
    with httpx_sse.connect_sse(running.client(), "POST", PATH, json={**CALL, "stream": True}) as source:
        events = source.iter_sse()
        assert next(events).json()["text"] == "first"
        node.go_on.set()
        error = next(events)
        assert error.event == "error"
        assert error.json()["error"]["type"] == "node_failed"
        assert list(events) == []


def test_node_dies_before_a_whole_reply_is_there(bare: Running) -> None:
    running = bare
    running.node(die_after_first).go_on.set()
    assert error_of(running.client().post(PATH, json=CALL)) == (502, "node_failed")


def test_openai_stream_ends_with_an_error_event(bare: Running) -> None:
    running = bare
    node = running.node(die_after_first)
    body = {"model": "stories260K", "prompt": "x", "stream": True}
    with httpx_sse.connect_sse(running.client(), "POST", "/v1/completions", json=body) as source:
        events = source.iter_sse()
        assert next(events).json()["choices"][0]["text"] == "first"
        node.go_on.set()
        assert [event.json()["error"]["code"] for event in events] == ["node_failed"]


def test_silent_node_fails_its_requests(start: Callable[..., Running]) -> None:
    running = start(node_silence=0.0)  # every look finds it silent
    running.node(hang_before_first)
    assert error_of(running.client().post(PATH, json=CALL)) == (502, "node_failed")


@pytest.mark.usefixtures("quickly_probed")
def test_vanishing_client_cancels_on_the_node(bare: Running) -> None:
    running = bare
    node = running.node(hang_after_first)
    with httpx_sse.connect_sse(running.client(), "POST", PATH, json={**CALL, "stream": True}) as source:
        assert next(source.iter_sse()).json()["text"] == "first"
    assert node.disconnected.wait(30)
    node.script = echo
    assert running.client().post(PATH, json=CALL).status_code == 200


@pytest.mark.usefixtures("quickly_probed")
@pytest.mark.parametrize("stream", [False, True])
def test_vanishing_client_before_the_first_token(bare: Running, stream: bool) -> None:
    running = bare
    node = running.node(hang_before_first)
    body = b'{"prompt": "x", "stream": %s}' % (b"true" if stream else b"false")
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        key = f"x-api-key: {running.keys['acme']}\r\n"
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\n{key}content-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        assert node.began.wait(30)
    assert node.disconnected.wait(30)


def test_timeout_before_the_first_token(bare: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not keep to the deadline is given up a little later."""
    monkeypatch.setattr("gateway.calls.node_client.DEADLINE_SLACK", 0.1)
    running = bare
    running.node(hang_before_first)
    assert error_of(running.client().post(PATH, json={**CALL, "timeout": 0.1})) == (504, "timeout")


def test_force_delete_cancels(bare: Running, pirate: dict) -> None:
    running = bare
    node = running.node(hang_after_first)
    client = running.client()
    client.post("/deploy/pirate", files=pirate)
    with httpx_sse.connect_sse(client, "POST", "/invoke/pirate", json={"prompt": "x", "stream": True}) as source:
        events = source.iter_sse()
        next(events)
        assert running.client().delete("/functions/pirate?force=true").status_code == 204
        assert next(events).json()["error"]["type"] == "cancelled"
    assert node.disconnected.wait(30)


def test_plain_delete_lets_running_ones_finish(bare: Running, pirate: dict) -> None:
    running = bare
    node = running.node(hang_after_first)
    client = running.client()
    client.post("/deploy/pirate", files=pirate)
    with httpx_sse.connect_sse(client, "POST", "/invoke/pirate", json={"prompt": "x", "stream": True}) as source:
        events = source.iter_sse()
        next(events)
        assert running.client().delete("/functions/pirate").status_code == 204
        assert running.client().post("/invoke/pirate", json=CALL).status_code == 404
        node.go_on.set()
        assert [event.event for event in events] == ["token", "done"]


def test_too_many_requests_at_once(start: Callable[..., Running]) -> None:
    running = start(max_concurrent=1)
    node = running.node(hang_after_first)
    with httpx_sse.connect_sse(running.client(), "POST", PATH, json={**CALL, "stream": True}) as source:
        events = source.iter_sse()
        next(events)
        second = running.client()
        reply = second.post(PATH, json=CALL)
        assert error_of(reply) == (429, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        assert second.get("/healthz").status_code == 200
        assert running.client("admin").get("/pools").status_code == 200
        node.go_on.set()
        list(events)
    node.script = echo
    deadline = time.monotonic() + 30
    while second.post(PATH, json=CALL).status_code == 429:  # the first one's end is seen a moment later
        assert time.monotonic() < deadline


def test_reservations_end_with_their_requests(start: Callable[..., Running]) -> None:
    running = start()
    node = running.node(hang_before_first)
    client, admin = running.client(), running.client("admin")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.post, PATH, json=CALL)
        assert node.began.wait(30)
        assert admin.get("/nodes").json()["nodes"][0]["reserved"] == 1
        node.publish(running.url)  # which acknowledges the request
        assert admin.get("/nodes").json()["nodes"][0]["reserved"] == 0
        node.go_on.set()
        assert call.result(30).status_code == 200
    node.script = refuse
    client.post(PATH, json=CALL)
    assert admin.get("/nodes").json()["nodes"][0]["reserved"] == 0
