"""Heads without end, heads that do not come, and bytes that are no HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from running_gateway import Running
from stub_node import flood, hang_after_first, hang_before_first

from gateway.http_protocol import HEAD_BYTES

START = b"POST /invoke/stories260K HTTP/1.1\r\nhost: x\r\n"


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        yield raw


def answer(raw: socket.socket) -> bytes:
    """All that comes until the server closes."""
    got = b""
    while chunk := raw.recv(65536):
        got += chunk
    return got


def pour(raw: socket.socket, start: bytes, piece: bytes) -> int:
    """Send `piece` again and again until the server has had enough; bytes that went out."""
    raw.sendall(start)
    sent = 0
    try:
        while sent < 64 << 20:
            raw.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        (START, b"x-a: " + b"y" * 1000 + b"\r\n"),
        (START + b"x-endless: ", b"y" * 1000),
        (b"GET /", b"a" * 1000),
        (START + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"trailer: " + b"y" * 1000 + b"\r\n"),
        (START + b"transfer-encoding: chunked\r\n\r\n1;", b"e=" + b"y" * 1000 + b";"),
    ],
)
def test_endless_heads_and_trailers_are_cut_off(gateway: Running, begun: bytes, piece: bytes) -> None:
    with connected(gateway) as raw:
        assert pour(raw, begun, piece) < 32 << 20  # socket buffers hold some of it
    assert gateway.client().post("/invoke/stories260K", json={"prompt": "x"}).status_code == 200


def test_a_head_just_over_the_limit_is_told(gateway: Running) -> None:
    with connected(gateway) as raw:
        raw.sendall(START + b"x-a: " + b"y" * HEAD_BYTES)
        head, _, body = answer(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request"


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\x01", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n"]
)
def test_what_is_no_http(gateway: Running, junk: bytes) -> None:
    with connected(gateway) as raw:
        raw.sendall(junk)
        head, _, body = answer(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request"
    assert f"x-request-id: {error['request_id']}".encode() in head


@pytest.mark.parametrize(
    "sent", [b"", START, b"POST /functions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf"]
)
def test_who_does_not_go_on_is_closed(gateway: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """The last one was answered before its body was there, which nobody waits for without end."""
    monkeypatch.setattr("gateway.http_protocol.HEAD_SECONDS", 0.2)
    with connected(gateway) as raw:
        raw.sendall(sent)
        got = answer(raw)
    assert got == b"" or got.startswith(b"HTTP/1.1 405")


def test_a_slow_reply_outlives_the_deadline_of_heads(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a second request on the same connection."""
    monkeypatch.setattr("gateway.http_protocol.HEAD_SECONDS", 1.5)
    running = start()
    node, client = running.node(hang_before_first), running.client()
    for _ in range(2):
        node.began.clear()
        node.go_on.clear()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.post, "/invoke/stories260K", json={"prompt": "x"})
            assert node.began.wait(30)
            time.sleep(1.6)
            node.go_on.set()
            assert call.result(60).status_code == 200


def test_who_does_not_read_is_cut_off(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends on the node, too."""
    monkeypatch.setattr("gateway.http_protocol.WRITE_SECONDS", 0.2)
    running = start()
    node = running.node(flood)
    body = b'{"prompt": "x", "stream": true}'
    with connected(running) as raw:
        key = f"x-api-key: {running.keys['acme']}\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(START + key.encode() + body)
        assert node.disconnected.wait(60)
    assert running.client().get("/healthz").status_code == 200


def test_garbage_behind_a_request_does_not_show_inside_its_answer(start: Callable[..., Running]) -> None:
    running = start()
    running.node(hang_after_first)
    body = b'{"prompt": "x", "stream": true}'
    with connected(running) as raw:
        key = f"x-api-key: {running.keys['acme']}\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(START + key.encode() + body)
        got = b""
        while b"first" not in got:
            got += raw.recv(65536)
        raw.sendall(b"\x16\x03\x01 garbage\r\n\r\n")
        got += answer(raw)
    assert got.count(b"HTTP/1.1") == 1
    assert b"invalid_request" not in got


def test_broken_requests_are_counted_and_not_logged(gateway: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    for _ in range(5):
        with connected(gateway) as raw:
            raw.sendall(b"this is no HTTP\r\n\r\n")
            assert answer(raw).startswith(b"HTTP/1.1 400")
    upgrade = {"connection": "upgrade", "upgrade": "websocket"}
    assert gateway.client(None).get("/functions", headers=upgrade).status_code == 401
    counted = gateway.client("admin").get("/metrics").text
    assert 'garnish_requests_total{route="unparsable",status="400"} 5.0' in counted
    assert [record for record in caplog.records if record.name.startswith(("uvicorn", "gateway"))] == []
