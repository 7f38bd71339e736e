"""Several requests on one connection, offers of another protocol, and readers that take their time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from held_timers import HeldTimers
from running_gateway import Running, until
from served_app import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from stub_node import Script, StubNode, hang_after_first, hang_before_first

from cluster.http_protocol import HEAD_LINES, MAX_WAITING, BoundedHttp
from gateway.http.protocol import WRITE_SECONDS, GatewayHttp

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
GARBAGE = b"\x16\x03\x01 garbage\r\n\r\n"


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        yield raw


def answer(raw: socket.socket) -> bytes:
    """All that comes until the server closes, or resets."""
    got = b""
    try:
        while chunk := raw.recv(65536):
            got += chunk
    except ConnectionResetError:
        pass
    return got


def call(running: Running, stream: bytes = b"true") -> bytes:
    body = b'{"prompt": "x", "stream": %s}' % stream
    key = running.keys["acme"].encode()
    head = b"POST /invoke/stories260K HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (key, len(body)) + body


def test_requests_without_end_do_not_pile_up_behind_a_slow_one(reused: Running) -> None:
    """Each of them would take some kilobytes, from a caller without a key."""
    running, node = reused, reused.nodes[0]
    node.script = hang_before_first
    with connected(running.url) as raw:
        raw.sendall(call(running))
        assert node.began.wait(30)
        raw.sendall(HEALTH * (MAX_WAITING + 2))
        assert answer(raw) == b""
    assert node.disconnected.wait(30)
    assert running.client().get("/healthz").status_code == 200


def test_so_many_requests_may_wait_on_one_connection(reused: Running) -> None:
    running, node = reused, reused.nodes[0]
    node.script = hang_before_first
    with connected(running.url) as raw:
        raw.sendall(call(running, b"false"))
        assert node.began.wait(30)
        raw.sendall(HEALTH * MAX_WAITING)
        raw.shutdown(socket.SHUT_WR)
        time.sleep(0.2)
        node.go_on.set()
        assert answer(raw).count(b"HTTP/1.1 200") == 1 + MAX_WAITING


@contextmanager
def hung_call(running: Running, script: Script) -> Iterator[tuple[socket.socket, StubNode]]:
    """A connection whose call the node has begun."""
    (node,) = running.nodes
    node.script = script
    with connected(running.url) as raw:
        raw.sendall(call(running))
        assert node.began.wait(30)
        yield raw, node


@pytest.mark.parametrize("script", [hang_before_first, hang_after_first])
def test_a_caller_that_leaves_ends_its_request_although_another_one_waits(
    start: Callable[..., Running], script: Script
) -> None:
    """Which is seen when something is sent to it: headers and signs of life."""
    running = start(header_seconds=0.1, keepalive_seconds=0.1)
    running.node(script)
    with hung_call(running, script) as (raw, node):
        raw.sendall(HEALTH)
        time.sleep(0.2)
    assert node.disconnected.wait(30)


@pytest.mark.parametrize("script", [hang_before_first, hang_after_first])
@pytest.mark.parametrize("behind", [GARBAGE, HEALTH + GARBAGE], ids=["at once", "behind another one"])
def test_what_is_no_request_is_not_answered_in_the_place_of_another(
    reused: Running, script: Script, behind: bytes
) -> None:
    with hung_call(reused, script) as (raw, node):
        got = b""
        while script is hang_after_first and b"first" not in got:
            got += raw.recv(65536)
        raw.sendall(behind)
        got += answer(raw)
    assert b"HTTP/1.1 400" not in got and b"invalid_request" not in got
    assert node.disconnected.wait(30)


def echo_server() -> Starlette:
    async def echo(request: Request) -> Response:
        return Response(await request.body(), headers={"x-offered": request.headers.get("upgrade", "")})

    return Starlette(routes=[Route("/echo", echo, methods=["GET", "POST"])])


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQ\r\n"
"""As curl --http2 and Java's HttpClient send it, by default, on connections without TLS."""
POST = b"POST /echo?a=b HTTP/1.1\r\nhost: x\r\n" + OFFER
HIDDEN = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
"""A body that would be a request."""


@pytest.mark.parametrize("http", [BoundedHttp, GatewayHttp])
@pytest.mark.parametrize("size", [1, 7, 1 << 16], ids=["bytes", "pieces", "at once"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_another_protocol_keeps_its_body(
    http: type[BoundedHttp], size: int, chunked: bool
) -> None:
    length = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(HIDDEN)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN) if chunked else HIDDEN
    sent = 3 * (POST + length + b"\r\n\r\n" + body)
    with served(echo_server(), http=http) as url, connected(url) as raw:
        for at in range(0, len(sent), size):
            raw.sendall(sent[at : at + size])
        raw.sendall(b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got = answer(raw)
    assert got.count(b"HTTP/1.1 200") == 4
    assert got.count(HIDDEN) == 3


def test_a_trailer_does_not_become_a_header() -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    with served(echo_server()) as url, connected(url) as raw:
        raw.sendall(head + b"2\r\nok\r\n0\r\nupgrade: late\r\n\r\n")
        got = answer(raw)
    assert got.endswith(b"ok") and b"late" not in got


def test_offers_of_another_protocol_have_the_bounds_of_all_heads(reused: Running) -> None:
    start = b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + OFFER
    with connected(reused.url) as raw:
        raw.sendall(start + b"connection: close\r\n\r\n")
        assert answer(raw).startswith(b"HTTP/1.1 200")
    with connected(reused.url) as raw:
        raw.sendall(start + b"x: " + b"y" * (64 << 10) + b"\r\n\r\n")
        assert answer(raw).startswith(b"HTTP/1.1 431")
    with connected(reused.url) as raw:
        raw.sendall((start + b"\r\n") * 4000)
        raw.shutdown(socket.SHUT_WR)
        assert answer(raw).count(b"HTTP/1.1 200") <= 1 + MAX_WAITING
    with connected(reused.url) as raw:
        raw.sendall(b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer(raw).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("over", [0, 1])
def test_short_lines_are_counted(reused: Running, over: int) -> None:
    """Each takes a hundred bytes and more, also in a head that never ends."""
    with connected(reused.url) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * (HEAD_LINES - 2 + over))
        raw.sendall(b"connection: close\r\nz" if over else b"connection: close\r\n\r\n")
        assert answer(raw).startswith(b"HTTP/1.1 431" if over else b"HTTP/1.1 200")


BIG, LOOKS = 32 << 20, 4
"""Bytes, and into how many parts time divides them: each is more than the buffers of both sockets hold."""


@pytest.mark.parametrize("reads", [True, False])
def test_a_slow_reader_gets_all_and_one_that_stopped_is_cut_off(reads: bool) -> None:
    """Also when it takes much longer than a connection without a request is kept."""
    timers = HeldTimers()

    async def big(_: Request) -> Response:
        return Response(b"x" * BIG)

    app = Starlette(routes=[Route("/big", big)])
    with served(app, http=timers.of(GatewayHttp)) as url, connected(url) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        raw.sendall(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        got = len(receive(raw, 1))
        until(lambda: WRITE_SECONDS in timers.seconds)
        for look in range(1, LOOKS if reads else 2):
            while reads and got < look * BIG // LOOKS:
                got += len(receive(raw))
            timers.pass_next()
        if not reads:  # it is cut off at the next look where the buffers took more since the first one
            time.sleep(0.2)
            timers.pass_time()
        while got <= BIG and (chunk := receive(raw)):
            got += len(chunk)
        assert (got > BIG) == reads
        timers.pass_time()
        while receive(raw):  # until it is closed
            pass


def receive(raw: socket.socket, most: int = 1 << 18) -> bytes:
    try:
        return raw.recv(most)
    except ConnectionResetError:
        return b""
