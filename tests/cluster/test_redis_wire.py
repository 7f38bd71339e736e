"""The connection to Redis: answers go to whom they belong, however they come, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import hiredis
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import RedisError
from worlds import until

from benchmarks.redis_server import RedisServer, redis_server
from cluster import redis_wire
from cluster.redis_wire import RedisWire, WireFull, open_wire

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Told = list[tuple[bytes, bytes]]


@asynccontextmanager
async def wire_to(
    url: str, lost: list[Exception] | None = None, told: Told | None = None, seconds: float = 5.0
) -> AsyncIterator[RedisWire]:
    wire = await open_wire(
        url,
        connect_seconds=5.0,
        call_seconds=seconds,
        on_lost=(lost if lost is not None else []).append,
        on_message=None if told is None else lambda channel, data: told.append((channel, data)),
    )
    try:
        yield wire
    finally:
        await wire.close()
        await wire.close()


@asynccontextmanager
async def peer(serve: Callable[[Reader, Writer], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that says what a test wants to be said, once redis-py has connected: its two questions are answered."""

    async def greet(reader: Reader, writer: Writer) -> None:
        for _ in range(2):
            await read_command(reader)
            writer.write(b"+OK\r\n")
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    try:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    finally:
        server.close()


async def read_command(reader: Reader) -> list[bytes]:
    count = int((await reader.readline())[1:])
    found = []
    for _ in range(count):
        size = int((await reader.readline())[1:])
        found.append((await reader.readexactly(size + 2))[:-2])
    return found


async def _true(value: bool) -> bool:
    return value


def test_many_at_once(shared_redis: RedisServer) -> None:
    """Each gets its own answer; a refusal is one caller's alone."""

    async def main() -> None:
        lost: list[Exception] = []
        async with wire_to(shared_redis.url, lost) as wire:
            asked = [
                wire.ask("ECHO", str(number)) if number % 7 else wire.ask("NONSENSE", number) for number in range(500)
            ]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for number, answer in enumerate(answers):
                if number % 7:
                    assert answer == str(number).encode()
                else:
                    assert isinstance(answer, hiredis.ReplyError)
            assert await wire.ask("EVAL", "return {1, ARGV[1], false}", 0, b"\x00\r\n\xff") == [
                1,
                b"\x00\r\n\xff",
                None,
            ]
        assert not lost

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["unix", "password"])
def test_connects_as_the_address_says(tmp_path: Path, scheme: str) -> None:
    """redis-py reads the address; the database shows that it did."""

    async def main(url: str, server: RedisServer) -> None:
        async with wire_to(url) as wire:
            await wire.ask("SET", "here", scheme)
        with server.client as client:
            client.select(3)
            assert client.get("here") == scheme.encode()

    with redis_server(tmp_path, password="hush-hush" if scheme == "password" else None) as server:
        path = str(tmp_path / "redis.sock")
        if scheme == "unix":
            server.kill()
            server.start("--unixsocket", path)
        url = f"unix://{path}?db=3" if scheme == "unix" else server.url.replace("/0", "/3")
        asyncio.run(main(url, server))
        if scheme == "password":
            with pytest.raises(RedisError):
                asyncio.run(main(url.replace("hush-hush", "guess"), server))


def test_messages_and_answers_on_one_connection(shared_redis: RedisServer) -> None:
    async def main() -> None:
        told: Told = []
        async with wire_to(shared_redis.url, told=told) as wire, wire_to(shared_redis.url) as other:
            assert await wire.ask("SUBSCRIBE", "a") == [b"subscribe", b"a", 1]
            sent = [other.ask("PUBLISH", "a", number) for number in range(50)]
            assert await wire.ask("SUBSCRIBE", "b") == [b"subscribe", b"b", 2]
            assert await asyncio.gather(*sent) == [1] * 50
            await other.ask("PUBLISH", "b", b"last")
            await until(lambda: _true((b"b", b"last") in told))
            assert told == [(b"a", str(number).encode()) for number in range(50)] + [(b"b", b"last")]

    asyncio.run(main())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.sets(st.integers(0, 11)))
def test_answers_in_drawn_pieces(sizes: list[int], leave: set[int]) -> None:
    """However the bytes come, and whoever has gone meanwhile, each answer goes to whom it belongs."""

    async def serve(reader: Reader, writer: Writer) -> None:
        told = b""
        for _ in range(12):
            word = (await read_command(reader))[1]
            told += b"*2\r\n$%d\r\n%s\r\n:%d\r\n" % (len(word), word, len(word))
        at = turn = 0
        while at < len(told):
            size = sizes[turn % len(sizes)]
            writer.write(told[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
            at, turn = at + size, turn + 1
        await reader.read()

    async def main() -> None:
        async with peer(serve) as url, wire_to(url) as wire:
            calls = [asyncio.ensure_future(wire.ask("ECHO", "x" * number)) for number in range(11)]
            await asyncio.sleep(0)
            for number in leave & set(range(11)):
                calls[number].cancel()
            calls.append(asyncio.ensure_future(wire.ask("ECHO", "last")))
            for number, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
                if number in leave and number < 11:
                    assert isinstance(answer, asyncio.CancelledError)
                else:
                    word = b"last" if number == 11 else b"x" * number
                    assert answer == [word, len(word)]

    asyncio.run(main())


async def _hangs(reader: Reader, writer: Writer) -> None:
    await reader.read()


async def _closes(reader: Reader, writer: Writer) -> None:
    await read_command(reader)


async def _talks_nonsense(reader: Reader, writer: Writer) -> None:
    await read_command(reader)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await reader.read()


async def _answers_nothing_asked(reader: Reader, writer: Writer) -> None:
    await read_command(reader)
    writer.write(b":1\r\n:2\r\n:3\r\n:4\r\n")
    await reader.read()


async def _is_ever_later(reader: Reader, writer: Writer) -> None:
    """There is always an answer that has just come."""
    due: deque[float] = deque()

    async def answer() -> None:
        while True:
            await asyncio.sleep(0.01)
            if due and due[0] < time.monotonic() - 0.5:
                due.popleft()
                writer.write(b"+PONG\r\n")

    answering = asyncio.create_task(answer())
    try:
        while await read_command(reader):
            due.append(time.monotonic())
    finally:
        answering.cancel()


def test_answers_that_are_all_late_are_overdue() -> None:
    async def main() -> None:
        lost: list[Exception] = []
        async with peer(_is_ever_later) as url, wire_to(url, lost, seconds=0.2) as wire:
            calls = []
            async with asyncio.timeout(20):
                while not lost:
                    calls.append(wire.ask("PING"))
                    await asyncio.sleep(0.02)
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(lost[0], TimeoutError)
        assert b"PONG" not in answers

    asyncio.run(main())


@pytest.mark.parametrize(
    ("serve", "raised"),
    [
        (_hangs, TimeoutError),
        (_closes, ConnectionError),
        (_talks_nonsense, ConnectionError),
        (_answers_nothing_asked, None),
    ],
)
def test_is_lost(serve: Callable[[Reader, Writer], Awaitable[None]], raised: type[Exception] | None) -> None:
    """All who wait are told why, and who asks later is refused at once. It is said once."""

    async def main() -> None:
        lost: list[Exception] = []
        async with peer(serve) as url, wire_to(url, lost, seconds=0.2) as wire:
            answers = await asyncio.gather(*[wire.ask("PING") for _ in range(3)], return_exceptions=True)
            for answer in answers:
                assert isinstance(answer, raised) if raised else answer in (1, 2, 3)
            await until(lambda: _true(bool(lost)))
            with pytest.raises(ConnectionError):
                await wire.ask("PING")
            await asyncio.sleep(0.3)
        assert len(lost) == 1

    asyncio.run(main())


def test_a_process_that_stood_still_reads_what_has_come(shared_redis: RedisServer) -> None:
    """Its clock says that the answer is overdue, but it was there in time."""

    async def main() -> None:
        lost: list[Exception] = []
        async with wire_to(shared_redis.url, lost, seconds=0.2) as wire:
            answer = asyncio.ensure_future(wire.ask("ECHO", "there"))
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251  (that is the point)
            assert await answer == b"there"
        assert not lost

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())


def test_is_closed_by_its_owner(shared_redis: RedisServer) -> None:
    """Nobody is told that it was lost, but whoever waits is."""

    async def main() -> None:
        lost: list[Exception] = []
        async with wire_to(shared_redis.url, lost) as wire:
            asked = asyncio.ensure_future(wire.ask("BLPOP", "nothing", 0))
            await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError):
            await asked
        assert not lost

    asyncio.run(main())


def test_how_much_may_be_asked_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_wire, "MAX_ASKED", 3)

    async def main() -> None:
        async with peer(_hangs) as url, wire_to(url) as wire:
            calls = [asyncio.ensure_future(wire.ask("PING")) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(WireFull, match="3 answers"):
                await wire.ask("PING")
            assert not any(call.done() for call in calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(main())
