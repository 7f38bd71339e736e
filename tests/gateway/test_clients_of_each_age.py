"""Clients of HTTP/1.0 and 1.1 by what they send: whole and streamed answers, kept and pipelined connections, and bodies
that wait for `100 Continue`."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from urllib.parse import urlsplit

import pytest
from running_gateway import Running

END = b"data: [DONE]\n\n"


@pytest.fixture
def gateway(reused: Running) -> Running:
    return reused


def request(gateway: Running, version: str, *headers: str, stream: bool = False, max_tokens: int = 2) -> bytes:
    body = {"model": "stories260K", "prompt": "Once", "max_tokens": max_tokens, "stream": stream}
    content = json.dumps(body).encode()
    lines = [
        f"POST /v1/completions HTTP/{version}",
        "Host: gateway",
        f"Authorization: Bearer {gateway.keys['acme']}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


@contextmanager
def connected(gateway: Running) -> Iterator[socket.socket]:
    parts = urlsplit(gateway.url)
    assert parts.hostname is not None and parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        yield connection


def until_closed(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head, in lower case, and the body of the only answer."""
    with connection.makefile("rb") as stream:
        head, _, body = stream.read().partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("expects", [False, True])
def test_a_streamed_answer(gateway: Running, version: str, expects: bool) -> None:
    headers = ["Connection: close", *(["Expect: 100-continue"] if expects and version == "1.0" else [])]
    with connected(gateway) as connection:
        connection.sendall(request(gateway, version, *headers, stream=True))
        head, body = until_closed(connection)
    assert head.startswith(b"http/1.1 200"), head
    assert (b"transfer-encoding: chunked" in head) == (version == "1.1")
    assert b"connection: close" in head
    if version == "1.0":
        assert body.startswith(b"data: {") and body.endswith(END)
        events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n")[:-2]]
        assert "".join(event["choices"][0]["text"] for event in events) == " t0 t1"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_whole_answer_states_its_length(gateway: Running, version: str) -> None:
    with connected(gateway) as connection:
        connection.sendall(request(gateway, version, "Connection: close"))
        head, body = until_closed(connection)
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["choices"][0]["text"] == " t0 t1"


def _text(connection: socket.socket) -> str:
    with HTTPResponse(connection) as answer:
        answer.begin()
        return str(json.loads(answer.read())["choices"][0]["text"])


def test_kept_and_pipelined_connections(gateway: Running) -> None:
    with connected(gateway) as connection:
        for tokens in (1, 2):
            connection.sendall(request(gateway, "1.1", max_tokens=tokens))
            assert _text(connection) == " t0 t1"[: 3 * tokens]
        connection.sendall(request(gateway, "1.1", max_tokens=2) + request(gateway, "1.1", "Connection: close"))
        with connection.makefile("rb") as stream:
            assert stream.read().count(b'"text":" t0 t1"') == 2


def test_a_body_that_waits_for_leave(gateway: Running) -> None:
    head, _, body = request(gateway, "1.1", "Expect: 100-continue", "Connection: close").partition(b"\r\n\r\n")
    with connected(gateway) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.sendall(body)
        assert until_closed(connection)[0].startswith(b"http/1.1 200")
