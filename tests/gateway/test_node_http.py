"""Answers of nodes as they come over the network: in any pieces, broken off, too large, too fast; kept connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import node_http
from gateway.node_http import BUFFER_BYTES, HEAD_BYTES, NodeConnections, NodeResponse

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Serve = Callable[[Reader, Writer], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def run(main: Callable[[], Awaitable[None]]) -> None:
    """On both event loops: the gateway's, and the one of a process without it."""
    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(_bounded(main))


async def _bounded(main: Callable[[], Awaitable[None]]) -> None:
    """Nothing may be left to the event loop to complain of."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(30):
        await main()
    assert not complaints


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


async def request_of(reader: Reader) -> tuple[bytes, bytes]:
    """Head and body. Raises IncompleteReadError when no more come."""
    head = await reader.readuntil(b"\r\n\r\n")
    (size,) = (int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: "))
    return head, await reader.readexactly(size)


@asynccontextmanager
async def node(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[int]]]:
    """Its url, and one entry per connection made to it."""
    made: list[int] = []

    async def accepted(reader: Reader, writer: Writer) -> None:
        made.append(1)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway has gone
        finally:
            writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}", made
    finally:
        server.close()


@asynccontextmanager
async def connections(connect: float = 5.0) -> AsyncIterator[NodeConnections]:
    kept = NodeConnections({"authorization": "Bearer hush"}, connect=connect)
    try:
        yield kept
    finally:
        kept.close()
        assert not kept._idle


async def emptied(kept: NodeConnections) -> None:
    while kept._idle:  # noqa: ASYNC110  (nothing tells of it)
        await asyncio.sleep(0.01)


async def whole(response: NodeResponse) -> bytes:
    found = b""
    while data := await response.read():
        found += data
    return found


def test_requests_share_a_connection_one_after_another() -> None:
    async def serve(reader: Reader, writer: Writer) -> None:
        while True:
            head, body = await request_of(reader)
            assert head.startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
            assert b"\r\nauthorization: Bearer hush\r\n" in head
            writer.write(HEAD + chunk(body) + chunk(body) + END)

    async def main() -> None:
        async with node(serve) as (url, made), connections() as kept:
            for number in range(5):
                response = await kept.post(url, "/generate", b"%d" % number)
                assert (response.status, await whole(response)) == (200, b"%d" % number * 2)
                response.close()
                response.close()
            assert len(made) == 1
            both = [await kept.post(url, "/generate", b"x") for _ in range(2)]
            assert both[0] is not both[1] and len(made) == 2
            for response in both:
                await whole(response)
                response.close()

    run(main)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 50))
def test_answers_in_drawn_pieces(body: bytes, sizes: list[int], width: int) -> None:
    pieces = [body[at : at + width] for at in range(0, len(body), width)]
    told = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"".join(map(chunk, pieces)) + END

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        at = turn = 0
        while at < len(told):
            size = sizes[turn % len(sizes)]
            writer.write(told[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
            at, turn = at + size, turn + 1
        await reader.read()

    async def main() -> None:
        async with node(serve) as (url, _), connections() as kept:
            response = await kept.post(url, "/generate", b"")
            assert (response.status, await whole(response)) == (200, body)
            response.close()
            assert kept._idle

    asyncio.run(_bounded(main))


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"HTTP/1.1 200",
        HEAD + chunk(b"half") + b"5\r\nab",
        HEAD + chunk(b"half"),
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (HEAD_BYTES + 10),
        HEAD + chunk(b"half") + b"nonsense\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: other\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_a_broken_answer(told: bytes) -> None:
    """What has come of it is read; then it is said that there is no more. The connection is of no further use."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(told)

    async def read_on(kept: NodeConnections, url: str) -> None:
        response = await kept.post(url, "/generate", b"")
        try:
            assert (await response.read()).startswith(b"half")
            await response.read()
        finally:
            response.close()

    async def main() -> None:
        async with node(serve) as (url, _), connections() as kept:
            with pytest.raises(OSError):
                await read_on(kept, url)
            assert not kept._idle

    run(main)


def test_a_connection_that_the_node_closed_is_not_used_again() -> None:
    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD + END)

    async def main() -> None:
        async with node(serve) as (url, made), connections() as kept:
            for _ in range(3):
                response = await kept.post(url, "/generate", b"")
                assert await whole(response) == b""
                response.close()
                await emptied(kept)
            assert len(made) == 3

    run(main)


@pytest.mark.parametrize(
    "reply", [HEAD[:-2] + b"connection: close\r\n\r\n" + END, HEAD + END + b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_a_connection_that_must_not_be_used_again(reply: bytes) -> None:
    """The node says so, or sends more than was asked for."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(reply)
        await reader.read()

    async def main() -> None:
        async with node(serve) as (url, made), connections() as kept:
            for number in range(2):
                response = await kept.post(url, "/generate", b"")
                await asyncio.sleep(0.05)
                assert await whole(response) == b""
                response.close()
                await asyncio.sleep(0.05)
                assert (kept._idle, len(made)) == ({}, number + 1)

    run(main)


def test_a_connection_with_a_request_half_sent_is_not_used_again() -> None:
    """The node answered before it had read the whole."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + END)
        await asyncio.sleep(1)

    async def main() -> None:
        async with node(serve) as (url, made), connections() as kept:
            for number in range(2):
                response = await kept.post(url, "/generate", bytes(32 << 20))
                assert await whole(response) == b""
                response.close()
                assert (kept._idle, len(made)) == ({}, number + 1)

    run(main)


def test_a_kept_connection_that_is_closing_is_not_used_again() -> None:
    """Its loss is told in the next turn of the event loop only."""

    async def serve(reader: Reader, writer: Writer) -> None:
        while True:
            await request_of(reader)
            writer.write(HEAD + END)

    async def main() -> None:
        async with node(serve) as (url, made), connections() as kept:
            for _ in range(2):
                both = [await kept.post(url, "/generate", b"") for _ in range(2)]
                for response in both:
                    await whole(response)
                    response.close()
                for response in both:
                    response._transport.close()
            assert len(made) == 4

    run(main)


def test_a_name_with_an_address_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is tried, also when nothing comes back from the first."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(b"there") + END)

    async def main() -> None:
        silent = socket.create_server(("127.0.0.1", 0), backlog=0)
        waiting = [socket.socket() for _ in range(4)]  # its queue is full: who else connects hears nothing
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        try:
            async with node(serve) as (url, _), connections() as kept:

                async def addresses(*_: object, **__: object) -> list[object]:
                    ports = [silent.getsockname()[1], int(url.rpartition(":")[2])]
                    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)) for port in ports]

                monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", addresses, raising=False)
                response = await kept.post("http://node.example:1", "/generate", b"")
                monkeypatch.undo()
                assert await whole(response) == b"there"
                response.close()
        finally:
            for each in [silent, *waiting]:
                each.close()

    asyncio.run(_bounded(main))


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\u0131\u0307.\u2488com"])
def test_a_name_that_nobody_can_have(host: str) -> None:
    async def main() -> None:
        async with connections() as kept:
            with pytest.raises(OSError):
                await kept.post(f"http://{host}:1", "/generate", b"")

    run(main)


def test_connections_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_http, "KEEP_SECONDS", 0.1)

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD + END)
        assert await reader.read() == b""

    async def main() -> None:
        async with node(serve) as (url, _), connections() as kept:
            response = await kept.post(url, "/generate", b"")
            await whole(response)
            response.close()
            assert kept._idle
            await emptied(kept)
            assert response._transport.is_closing()

    run(main)


def test_a_slow_reader_slows_the_node() -> None:
    """No more than the buffer, and what the kernel holds, is ever taken from it; and nothing is lost."""
    size = 16 << 20

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD)
        for _ in range(size >> 16):
            writer.write(chunk(b"x" * (1 << 16)))
            await writer.drain()
        writer.write(END)
        await reader.read()

    async def main() -> None:
        async with node(serve) as (url, _), connections() as kept:
            response = await kept.post(url, "/generate", b"")
            await asyncio.sleep(0.3)
            assert BUFFER_BYTES < len(response._waiting) < BUFFER_BYTES + (1 << 20)
            assert len(await whole(response)) == size
            response.close()

    run(main)


def test_whoever_reads_is_told_why_it_is_given_up() -> None:
    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(b"first"))
        await reader.read()

    async def main() -> None:
        async with node(serve) as (url, _), connections() as kept:
            response = await kept.post(url, "/generate", b"")
            assert await response.read() == b"first"
            reading = asyncio.create_task(response.read())
            await asyncio.sleep(0.05)
            response.fail(LookupError("revoked"))
            with pytest.raises(LookupError, match="revoked"):
                await reading
            with pytest.raises(LookupError):
                await response.read()
            response.close()
            assert not kept._idle and response._transport.is_closing()

    run(main)


def test_a_node_that_can_not_be_reached() -> None:
    """Nobody listens, or nobody greets."""

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.read()

    async def main() -> None:
        async with connections(connect=0.2) as hurried, node(serve) as (url, _):
            with pytest.raises(TimeoutError):
                await hurried.post(url.replace("http:", "https:"), "/generate", b"")
        async with connections() as kept:
            with pytest.raises(ConnectionRefusedError):
                await kept.post(url, "/generate", b"")

    run(main)


def test_cancelled_while_it_waits_for_an_answer() -> None:
    gone = asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        await reader.read()
        gone.set()

    async def main() -> None:
        async with node(serve) as (url, _), connections() as kept:
            asking = asyncio.create_task(kept.post(url, "/generate", b""))
            await asyncio.sleep(0.1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await gone.wait()
            assert not kept._idle

    asyncio.run(_bounded(main))


def test_over_tls_to_whom_the_certificate_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    wanted = ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *wanted], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)

    async def serve(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD + chunk(b"hidden") + END)
        await writer.drain()
        await reader.read()

    async def main() -> None:
        async with node(serve, server) as (url, _), connections() as kept:
            with pytest.raises(ssl.SSLCertVerificationError):
                await kept.post(url, "/generate", b"")
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))
            kept._tls = None
            response = await kept.post(url, "/generate", b"")
            assert await whole(response) == b"hidden"
            response.close()
            monkeypatch.delenv("SSL_CERT_FILE")

    run(main)
