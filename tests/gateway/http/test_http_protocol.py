"""Heads without end, heads that do not come, and bytes that are no HTTP."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import NoReturn

import httpx
import httpx_sse
import pytest
import requests
from held_timers import HeldTimers
from raw_http import send
from running_gateway import Running, as_new, start_gateway, until
from served_app import served
from stub_node import Script, flood, hang_after_first, hang_before_first

from cluster.http_protocol import HEAD_BYTES, KEYLESS_LINGER_BYTES
from gateway.http.protocol import PROBE_SECONDS, GatewayHttp

START = b"POST /invoke/stories260K HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        yield raw


@contextmanager
def small_buffers(running: Running) -> Iterator[socket.socket]:
    """A connection whose buffer for sending holds little."""
    with connected(running) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
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
    begun = begun.replace(b"host: x", b"host: x\r\nx-api-key: " + gateway.keys["acme"].encode())
    with connected(gateway) as raw:
        assert pour(raw, begun, piece) < 32 << 20  # socket buffers hold some of it
    assert gateway.client().post("/invoke/stories260K", json={"prompt": "x"}).status_code == 200


def test_a_head_just_over_the_limit_is_told(gateway: Running) -> None:
    with connected(gateway) as raw:
        raw.sendall(START + b"x-a: " + b"y" * HEAD_BYTES)
        head, _, body = answer(raw).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    assert json.loads(body)["error"]["type"] == "head_too_large"


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("where", ["path", "one line", "many lines"])
def test_complete_heads_have_the_same_limit(gateway: Running, where: str, over: int) -> None:
    """Also those that come at once, with a body behind them."""
    url, lines = b"/nothing", b"host: x\r\ncontent-length: 4\r\n"
    if where == "many lines":
        lines += b"x: 123456\r\n" * 900
    left = HEAD_BYTES + over - len(url) - len(lines)
    if where == "path":
        url += b"a" * left
    else:
        lines += b"y: " + b"z" * (left - 5) + b"\r\n"
    with connected(gateway) as raw:
        raw.sendall(b"POST " + url + b" HTTP/1.1\r\n" + lines + b"\r\nbody")
        got = raw.recv(65536)
    assert got.startswith(b"HTTP/1.1 431" if over else b"HTTP/1.1 404")


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
    monkeypatch.setattr("cluster.http_protocol.HEAD_SECONDS", 0.2)
    with connected(gateway) as raw:
        raw.sendall(sent)
        got = answer(raw)
    assert got == b"" or got.startswith(b"HTTP/1.1 405")


@pytest.fixture(scope="module")
def held(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, HeldTimers]]:
    """A gateway with a node, whose connections' timers go off when the test says so."""
    timers = HeldTimers()
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr("running_gateway.served", partial(served, http=timers.of(GatewayHttp)))
        running = start_gateway(stack, stories_dir, tmp_path_factory.mktemp("held"))
        patch.undo()
        running.node()
        yield running, timers


def test_a_slow_reply_outlives_the_deadline_of_heads(held: tuple[Running, HeldTimers]) -> None:
    """Also that of a second request on the same connection."""
    shared, timers = held
    with as_new(shared) as running, ThreadPoolExecutor(1) as pool:
        (node,), client = running.nodes, running.client()
        node.script = hang_before_first
        for _ in range(2):
            node.began.clear()
            node.go_on.clear()
            call = pool.submit(client.post, "/invoke/stories260K", json={"prompt": "x"})
            assert node.began.wait(30)
            timers.pass_time()
            node.go_on.set()
            assert call.result(60).status_code == 200


def test_who_does_not_read_is_cut_off(reused: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends on the node, too."""
    monkeypatch.setattr("gateway.http.protocol.WRITE_SECONDS", 0.2)
    running, node = reused, reused.nodes[0]
    node.script = flood
    body = b'{"prompt": "x", "stream": true}'
    with connected(running) as raw:
        key = f"x-api-key: {running.keys['acme']}\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(START + key.encode() + body)
        assert node.disconnected.wait(60)
    assert running.client().get("/healthz").status_code == 200


def test_garbage_behind_a_request_does_not_show_inside_its_answer(reused: Running) -> None:
    running, node = reused, reused.nodes[0]
    node.script = hang_after_first
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
    assert node.disconnected.wait(30)


def test_broken_requests_are_counted_and_not_logged(
    start: Callable[..., Running], caplog: pytest.LogCaptureFixture
) -> None:
    gateway = start()
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


def call_head(running: Running, body: bytes, version: bytes = b"1.1") -> bytes:
    key = f"x-api-key: {running.keys['acme']}\r\ncontent-length: {len(body)}\r\n\r\n"
    return START.replace(b"1.1", version) + key.encode()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize("script", [hang_before_first, hang_after_first])
def test_who_sends_no_more_still_gets_the_whole_answer(
    held: tuple[Running, HeldTimers], stream: bytes, script: Script, version: bytes
) -> None:
    """Probed meanwhile whether it still reads, which a parser of HTTP and of event streams does not notice."""
    shared, timers = held
    body = b'{"prompt": "x", "stream": %s}' % stream
    with as_new(shared) as running:
        (node,) = running.nodes
        node.script = script
        until(lambda: not timers.running)  # of connections before
        with connected(running) as raw:
            raw.sendall(call_head(running, body, version) + body)
            raw.shutdown(socket.SHUT_WR)
            assert node.began.wait(30)
            for _ in PROBE_SECONDS:
                timers.pass_next()
            node.go_on.set()
            reply = HTTPResponse(raw)
            reply.begin()
            got = reply.read()
    assert reply.status == 200
    if stream == b"true":
        assert [event.event for event in httpx_sse.EventSource(as_httpx(reply, got)).iter_sse()][-1] == "done"
    else:
        assert json.loads(got)["output"]["finish_reason"]


def as_httpx(reply: HTTPResponse, content: bytes) -> httpx.Response:
    return httpx.Response(reply.status, headers={"content-type": reply.headers["content-type"]}, content=content)


def test_requests_sent_together_are_all_answered_to_who_sends_no_more(gateway: Running) -> None:
    body = b'{"prompt": "x"}'
    with connected(gateway) as raw:
        raw.sendall(3 * (call_head(gateway, body) + body))
        raw.shutdown(socket.SHUT_WR)
        assert answer(raw).count(b"HTTP/1.1 200") == 3


BIG = 24 << 20
"""More than the buffers of both sockets hold."""


def refused_uploads(running: Running) -> list[tuple[int, str, dict[str, str], bytes]]:
    """(status, path, headers, begin of the body)"""
    key = {"x-api-key": running.keys["acme"]}
    form = {"content-type": "multipart/form-data; boundary=b"}
    part = b'--b\r\ncontent-disposition: form-data; name="%s"\r\n\r\n'
    return [
        (401, "/deploy/f", form, b""),
        (404, "/nothing", key, b""),
        (405, "/functions", key, b""),
        (413, "/invoke/stories260K", key | {"content-type": "application/json"}, b""),
        (413, "/deploy/f", key | form, part % b"policy"),
        (415, "/deploy/f", key | {"content-type": "text/plain"}, b""),
        (422, "/deploy/F", key | form, b""),
        (422, "/deploy/f", key | form, part % b"surprise"),
        (400, "/deploy/f", key | form, b"no part"),
    ]


@pytest.mark.parametrize("chunked", [False, True])
def test_refused_uploads_end_in_their_status(gateway: Running, chunked: bool) -> None:
    """For a client that sends everything before it reads, and for one that reads meanwhile."""
    for status, path, headers, begin in refused_uploads(gateway):
        body = begin + b"x" * (BIG - len(begin))
        pieces = (body[at : at + 65536] for at in range(0, BIG, 65536))
        reply = requests.post(gateway.url + path, data=pieces if chunked else body, headers=headers, timeout=60)
        assert reply.status_code == status, path
        assert reply.headers["connection"] == "close"
        raw_head = f"POST {path} HTTP/1.1\nhost: x\n" + "".join(f"{key}: {headers[key]}\n" for key in headers)
        length = "transfer-encoding: chunked" if chunked else f"content-length: {BIG}"
        content = b"%x\r\n%s\r\n0\r\n\r\n" % (BIG, body) if chunked else body
        assert send(gateway.url, raw_head + length, content)[0] == status
        again = httpx.post(gateway.url + path, content=body, headers=headers, timeout=60, verify=False)
        assert again.status_code == status
    assert gateway.client().get("/functions").status_code == 200


def test_an_upload_that_fills_the_disk_ends_in_its_status(gateway: Running) -> None:
    body = b'--b\r\ncontent-disposition: form-data; name="adapter_model.safetensors"\r\n\r\n' + b"x" * BIG
    headers = {"content-type": "multipart/form-data; boundary=b", "x-api-key": gateway.keys["acme"]}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # no file of this process takes more
    try:
        reply = requests.post(gateway.url + "/deploy/f", data=body, headers=headers, timeout=60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (reply.status_code, reply.json()["error"]["type"]) == (507, "insufficient_storage")
    assert list(Path(gateway.config.tmp_dir).iterdir()) == []


def test_of_a_refused_body_without_a_key_a_mebibyte_is_read(gateway: Running) -> None:
    """What the server has not read when it closes is in the buffers of the two sockets."""
    head = b"POST /deploy/f HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n"
    for key in (b"", b"x-api-key: gsk_unknown\r\n", b"x-api-key: " + gateway.keys["acme"].encode()[:-1] + b"x\r\n"):
        with small_buffers(gateway) as raw:
            assert pour(raw, head + key + b"\r\n", b"x" * 65536) < KEYLESS_LINGER_BYTES + (8 << 20)


def test_a_refused_body_with_a_key_is_read_to_its_end(gateway: Running) -> None:
    head = b"POST /deploy/F HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\ncontent-type: text/plain\r\n" % (32 << 20)
    with small_buffers(gateway) as raw:
        raw.sendall(head + b"x-api-key: " + gateway.keys["acme"].encode() + b"\r\n\r\n" + b"x" * (32 << 20))
        assert answer(raw).startswith(b"HTTP/1.1 4")


def test_a_refused_upload_beyond_all_bounds_is_cut_off(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.http_protocol.LINGER_BYTES", 1 << 20)
    with connected(gateway) as raw:
        key = b"x-api-key: " + gateway.keys["acme"].encode()
        head = b"POST /deploy/F HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n" + key + b"\r\n\r\n"
        assert pour(raw, head, b"x" * 65536) < 32 << 20


@pytest.mark.parametrize("seconds", [("LINGER_IDLE_SECONDS", 0.2), ("LINGER_SECONDS", 0.0)])
def test_who_does_not_end_a_refused_upload_is_closed(
    gateway: Running, monkeypatch: pytest.MonkeyPatch, seconds: tuple[str, float]
) -> None:
    monkeypatch.setattr("cluster.http_protocol.LINGER_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(f"cluster.http_protocol.{seconds[0]}", seconds[1])
    with connected(gateway) as raw:
        raw.sendall(b"POST /deploy/f HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n\r\n")
        assert answer(raw).startswith(b"HTTP/1.1 401")  # its end came at once
        pause = 0.01 if seconds[0] == "LINGER_SECONDS" else 0.3
        with pytest.raises(OSError):
            send_for_ever(raw, pause)


def send_for_ever(raw: socket.socket, pause: float) -> NoReturn:
    while True:
        raw.sendall(b"x")
        time.sleep(pause)
