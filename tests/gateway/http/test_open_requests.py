"""Open requests of a gateway worker: one tenant's leave room for others', and each gives its place back."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

import httpx_sse
import pytest
from running_gateway import Running, until
from stub_node import echo, hang_after_first

from gateway.http.bodies import LARGE_BODY
from gateway.places import pools
from gateway.places.places import Pool

SIZE, PART = 8, 6
PATH = "/invoke/stories260K"
CALL = {"prompt": "x", "max_tokens": 2}


@pytest.fixture
def running(start: Callable[..., Running]) -> Running:
    made = start(max_concurrent=SIZE)
    made.node()
    return made


def in_use(running: Running, pool: str = "requests") -> float:
    text = running.client("admin").get("/metrics").raise_for_status().text
    [found] = re.findall(rf'^garnish_pool_in_use{{pool="{pool}"}} (\S+)$', text, re.MULTILINE)
    return float(found)


def half_sent(running: Running) -> socket.socket:
    """Returns the connection of a call whose body does not come."""
    host, port = running.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nx-api-key: {running.keys['acme']}\r\n"
    raw.sendall(f"{head}content-type: application/json\r\ncontent-length: 100\r\nexpect: 100-continue\r\n\r\n".encode())
    assert raw.recv(12) in (b"HTTP/1.1 100", b"HTTP/1.1 429")
    return raw


def test_slow_bodies_of_one_tenant_leave_room_for_others(running: Running) -> None:
    held = [half_sent(running) for _ in range(2 * SIZE)]
    until(lambda: in_use(running) == PART)
    other = running.client("other")
    assert {other.post(PATH, json=CALL).status_code for _ in range(10)} == {200}
    assert other.get("/functions").status_code == 200
    refused = running.client().post(PATH, json=CALL)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "overloaded")
    assert f"you have {PART} requests under way already" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    for raw in held:
        raw.close()
    until(lambda: in_use(running) == 0)
    assert running.client().post(PATH, json=CALL).status_code == 200


def test_large_bodies_of_one_tenant_leave_room_for_others(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded with spaces, because a gateway keeps the bytes of a body whatever they say."""
    small = Pool(name="large_bodies", work="requests with large bodies", size=SIZE, per_tenant=PART)
    monkeypatch.setattr(pools, "FIXED_POOLS", (small, *pools.FIXED_POOLS[1:]))
    running = start()
    running.node(hang_after_first)
    large = json.dumps({**CALL, "stream": True}) + " " * (LARGE_BODY + 1)
    headers = {"content-type": "application/json"}
    with ExitStack() as held:
        for _ in range(PART):
            reply = held.enter_context(running.client().stream("POST", PATH, content=large, headers=headers))
            assert reply.status_code == 200
        assert in_use(running, "large_bodies") == PART
        refused = running.client().post(PATH, content=large, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "overloaded")
        assert f"you have {PART} requests with large bodies under way already" in refused.json()["error"]["message"]
        for role, body in (("acme", json.dumps({**CALL, "stream": True})), ("other", large)):
            with running.client(role).stream("POST", PATH, content=body, headers=headers) as reply:
                assert reply.status_code == 200, role
    until(lambda: in_use(running, "large_bodies") == 0)


def test_streams_give_their_places_back_however_they_end(running: Running) -> None:
    [node] = running.nodes
    node.script = hang_after_first
    for _ in range(2 * PART):  # callers go amid their streams
        with httpx_sse.connect_sse(running.client(), "POST", PATH, json={**CALL, "stream": True}) as source:
            next(source.iter_sse())
            assert in_use(running) >= 1
        until(lambda: in_use(running) == 0)
    node.script = echo
    with httpx_sse.connect_sse(running.client(), "POST", PATH, json={**CALL, "stream": True}) as source:
        assert [event.event for event in source.iter_sse()][-1] == "done"
    for path, body in (("/invoke/none", CALL), (PATH, {"prompt": 1})):  # refused ones
        assert running.client().post(path, json=body).status_code in (404, 422)
    until(lambda: in_use(running) == 0)


def test_a_refused_key_holds_no_place(running: Running) -> None:
    client = running.client(None, authorization="Bearer gsk_acme_0f3a91c2b7de_" + "0" * 64)
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        assert client.post(PATH, json=CALL).status_code == 401
        assert in_use(running) == 0
