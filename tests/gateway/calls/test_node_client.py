"""Streams of events from nodes as they come over the network: in any pieces, broken off, too large, too fast."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import subprocess
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_node import END, HEAD, REQUEST, TIMING, Reader, Writer, ask, bounded, chunk, node, node_client, request_of, run

from cluster.errors import ServiceError
from cluster.messages import Done, Event, Started, Token, encode_event
from gateway.calls.breaker import THRESHOLD
from gateway.calls.node_client import MAX_EVENT_BYTES
from gateway.calls.node_watch import NodeFailure
from gateway.scheduling.route import Route

EVENTS: list[Event] = [Started("n", "none"), Token("one", [1], 0), Done("length", 2, 1, 0, TIMING)]
FRAMES = [encode_event(event) for event in EVENTS]
ANSWER = HEAD + b"".join(map(chunk, FRAMES)) + END


async def serve(reader: Reader, writer: Writer) -> None:
    while True:
        await request_of(reader)
        writer.write(ANSWER)


def test_requests_share_a_connection_one_after_another() -> None:
    heads: list[bytes] = []

    async def serve_and_note(reader: Reader, writer: Writer) -> None:
        while True:
            heads.append((await request_of(reader))[0])
            writer.write(ANSWER)

    async def main() -> None:
        async with node(serve_and_note) as (url, made), node_client() as client:
            for _ in range(5):
                assert await ask(client, url) == EVENTS
            assert len(made) == 1
            assert all(head.startswith(b"POST /generate HTTP/1.1\r\n") for head in heads)
            assert all(b"\r\nauthorization: bearer hush\r\n" in head.lower() for head in heads)

    run(main)


@pytest.mark.parametrize("turns", range(6))
def test_a_request_given_up_at_its_end_fails_no_later_one(turns: int) -> None:
    """Whoever gives it up is heard some turns of the event loop later, when its connection serves another already."""

    async def main() -> None:
        async with node(serve) as (url, made), node_client() as client:
            revoked: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
            found: list[Event] = []
            async with aclosing(client.stream(Route("n", "1", url), REQUEST, revoked)) as events:
                async for event in events:
                    found.append(event)
                    if isinstance(event, Done):
                        revoked.set_result(ServiceError("not_found", "the function was deleted"))
                        for _ in range(turns):
                            await asyncio.sleep(0)
            found += await ask(client, url)
            assert (found, len(made)) == (2 * EVENTS, 1)

    run(main)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 50))
def test_answers_in_drawn_pieces(sizes: list[int], width: int) -> None:
    body = b"".join(FRAMES)
    pieces = [body[at : at + width] for at in range(0, len(body), width)]
    told = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"".join(map(chunk, pieces)) + END

    async def serve_pieces(reader: Reader, writer: Writer) -> None:
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
        async with node(serve_pieces) as (url, _), node_client() as client:
            assert await ask(client, url) == EVENTS

    asyncio.run(bounded(main))


BEGUN = HEAD + chunk(FRAMES[0]) + chunk(FRAMES[1])
BROKEN = {
    "nothing": (b"", 0),
    "half a status line": (b"HTTP/1.1 200", 0),
    "half a chunk": (BEGUN + b"5\r\nab", 2),
    "no end": (BEGUN, 2),
    "an end without Done": (BEGUN + END, 2),
    "another protocol": (b"SSH-2.0-OpenSSH\r\n", 0),
    "an endless header": (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 20), 0),
    "endless headers": (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000 + b"\r\n", 0),
    "nonsense between chunks": (BEGUN + b"nonsense\r\n", 2),
    "an upgrade": (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: other\r\nconnection: upgrade\r\n\r\n", 0),
    "a redirect": (b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n", 0),
    "an event over the limit": (BEGUN + chunk((MAX_EVENT_BYTES + 1).to_bytes(4, "big")), 2),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_answer(how: str) -> None:
    """What has come of it is given out; then the node has failed. The connection is of no further use."""
    told, count = BROKEN[how]

    async def serve_broken(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(told)

    async def main() -> None:
        async with node(serve_broken) as (url, made), node_client() as client:
            for number in range(2):
                found: list[Event] = []
                with pytest.raises(NodeFailure) as failure:
                    await ask(client, url, into=found)
                assert (failure.value.error.type, failure.value.retryable) == ("node_failed", True)
                # What comes in one piece with what can't be read may be lost with it.
                assert found == EVENTS[: len(found)] and len(found) <= count
                assert len(made) == number + 1 or told.endswith(END)

    run(main)


@pytest.mark.parametrize("reply", [ANSWER.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1), ANSWER + ANSWER])
def test_a_connection_that_must_not_be_used_again(reply: bytes) -> None:
    """The node says so, or sends more than was asked for."""

    async def serve_reply(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(reply)
        await reader.read()

    async def main() -> None:
        async with node(serve_reply) as (url, made), node_client() as client:
            for number in range(2):
                assert await ask(client, url) == EVENTS
                await asyncio.sleep(0.05)
                assert len(made) == number + 1

    run(main)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_a_connection_with_a_request_half_sent_is_not_used_again() -> None:
    """The node answered before it had read the whole."""
    large = msgspec.structs.replace(REQUEST, stop=["x" * (32 << 20)])

    async def serve_early(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await asyncio.sleep(1)

    async def main() -> None:
        async with node(serve_early) as (url, made), node_client() as client:
            for number in range(2):
                assert await ask(client, url, large) == EVENTS
                assert len(made) == number + 1

    run(main)


def test_a_slow_reader_slows_the_node() -> None:
    """No more than buffers hold is taken from it while nobody reads; and nothing is lost."""
    tokens = [Token("x" * (1 << 16), [1], index) for index in range(512)]
    sent: list[int] = []

    async def serve_fast(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(HEAD)
        for token in tokens:
            writer.write(chunk(encode_event(token)))
            await writer.drain()
            sent.append(token.index)
        writer.write(chunk(FRAMES[2]) + END)
        await reader.read()

    async def main() -> None:
        sent.clear()
        async with node(serve_fast) as (url, _), node_client() as client:
            revoked: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
            async with aclosing(client.stream(Route("n", "1", url), REQUEST, revoked)) as events:
                assert await anext(events) == tokens[0]
                before = -1
                while len(sent) > before:  # until it waits
                    before = len(sent)
                    for _ in range(100):
                        await asyncio.sleep(0)
                assert len(sent) < len(tokens) - 100
                assert [event async for event in events] == [*tokens[1:], EVENTS[2]]

    run(main)


def test_whoever_reads_is_told_why_it_is_given_up() -> None:
    async def serve_half(reader: Reader, writer: Writer) -> None:
        await request_of(reader)
        writer.write(BEGUN)
        await reader.read()

    async def main() -> None:
        async with node(serve_half) as (url, _), node_client() as client:
            revoked: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
            async with aclosing(client.stream(Route("n", "1", url), REQUEST, revoked)) as events:
                assert [await anext(events), await anext(events)] == EVENTS[:2]
                asyncio.get_running_loop().call_later(0.05, revoked.set_result, ServiceError("cancelled", "deleted"))
                with pytest.raises(ServiceError, match="deleted"):
                    await anext(events)

    run(main)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\u0131\u0307.\u2488com", "nobody.invalid"])
def test_a_name_that_nobody_has(host: str) -> None:
    async def main() -> None:
        async with node_client() as client:
            with pytest.raises(NodeFailure):
                await ask(client, f"http://{host}:1")

    run(main)


def test_a_node_that_can_not_be_reached() -> None:
    """Nobody listens, or nobody takes the connection."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        silent = socket.create_server(("127.0.0.1", 0), backlog=0)
        waiting = [socket.socket() for _ in range(4)]  # its queue is full: who else connects hears nothing
        try:
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(silent.getsockname())
            async with node_client(connect=0.2) as client:
                with pytest.raises(NodeFailure, match="ConnectorError"):
                    await ask(client, nobody)
                with pytest.raises(NodeFailure, match="Timeout"):
                    await ask(client, f"http://127.0.0.1:{silent.getsockname()[1]}")
        finally:
            for each in [silent, *waiting]:
                each.close()

    run(main)


def test_cancelled_while_it_waits_for_an_answer() -> None:
    """The node sees that nobody waits any more."""

    async def main() -> None:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def serve_nothing(reader: Reader, writer: Writer) -> None:
            await request_of(reader)
            asked.set()
            await reader.read()
            gone.set()

        async with node(serve_nothing) as (url, _), node_client() as client:
            asking = asyncio.create_task(ask(client, url))
            await asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await gone.wait()

    run(main)


def test_over_tls_the_certificate_must_be_trusted(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    wanted = ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run([*command, *wanted], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)

    async def main() -> None:
        async with node(serve, server) as (url, _), node_client() as client:
            with pytest.raises(NodeFailure, match="Certificate"):
                await ask(client, url)

    asyncio.run(main())


def test_a_gateway_without_descriptors_blames_no_node() -> None:
    """The call is told to come again; the node's circuit stays closed, however many calls find none."""

    async def main() -> None:
        async with node(serve) as (url, _), node_client() as client:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # the next descriptor would be the first too many
            try:
                for _ in range(THRESHOLD + 1):
                    with pytest.raises(ServiceError) as refused:
                        await ask(client, url)
                    assert (refused.value.type, refused.value.retry_seconds) == ("unavailable", 1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert await ask(client, url) == EVENTS

    run(main)
