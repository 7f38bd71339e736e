"""The link to Redis: answers go to whom they belong, whoever leaves meanwhile, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis
from worlds import PATIENCE, Clock, World, until

from cluster import redis_link
from cluster.redis_link import RedisAway, RedisLink
from tests.support.redis_server import RedisServer, redis_server

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


def echo(link: RedisLink, text: str, *, places: bool = False) -> Awaitable[bytes]:
    return asked(link._places if places else link._client, link, "ECHO", text)


def asked(client: Redis, link: RedisLink, *command: str) -> Awaitable[Any]:
    return link._ask(client.execute_command(*command))  # type: ignore[no-untyped-call]


async def is_up(link: RedisLink) -> bool:
    return link.is_up


async def is_away(link: RedisLink) -> bool:
    return not link.is_up


@pytest.mark.parametrize("seed", range(3))
def test_answers_belong_to_their_callers_whoever_leaves(
    shared_redis: RedisServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn callers are cancelled at drawn times; the others get their own answers, and no connection is given up."""
    for bound in ("CALL_SECONDS", "CONNECT_SECONDS"):  # a host that stalls is not what is looked at
        monkeypatch.setattr(redis_link, bound, PATIENCE)
    draw = random.Random(seed)

    async def main() -> None:
        async with World(shared_redis).worker() as (link, _):
            calls = {}
            for number in range(1500):
                call = calls[number] = asyncio.ensure_future(echo(link, str(number), places=draw.random() < 0.3))
                if draw.random() < 0.3:
                    asyncio.get_running_loop().call_later(draw.random() * 0.05, call.cancel)
                if draw.random() < 0.02:
                    await asyncio.sleep(draw.random() * 0.02)
            answers = await asyncio.gather(*calls.values(), return_exceptions=True)
            right = [answer == str(number).encode() for number, answer in enumerate(answers)]
            left = [isinstance(answer, asyncio.CancelledError) for answer in answers]
            assert all(one or other for one, other in zip(right, left, strict=True))
            assert any(right)
            assert any(left)
            assert link.is_up
            assert await echo(link, "still there") == b"still there"

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["unix", "password"])
def test_connects_as_the_address_says(tmp_path: Path, scheme: str) -> None:
    async def main(url: str, patience: float) -> bool:
        link = RedisLink(url, "test:", "w", time.monotonic)
        async with link.running():
            if not await link.wait_until_up(patience):
                return False
            await link._ask(link._client.set("here", scheme))
            await link._ask(link._places.set("there", scheme))
            return True

    with redis_server(tmp_path, password="hush-hush" if scheme == "password" else None) as server:
        path = str(tmp_path / "redis.sock")
        if scheme == "unix":
            server.kill()
            server.start("--unixsocket", path)
        url = f"unix://{path}?db=3" if scheme == "unix" else server.url.replace("/0", "/3")
        assert asyncio.run(main(url, 20))
        with server.client as client:
            client.select(3)
            assert client.mget("here", "there") == [scheme.encode()] * 2
        if scheme == "password":
            assert not asyncio.run(main(url.replace("hush-hush", "guess"), 0.5))


async def _hangs(reader: Reader, _: Writer) -> None:
    await reader.read()


async def _closes(_reader: Reader, writer: Writer) -> None:
    writer.close()


async def _talks_nonsense(reader: Reader, writer: Writer) -> None:
    writer.write(b"nonsense\r\n")
    await reader.read()


@pytest.mark.parametrize("serve", [_hangs, _closes, _talks_nonsense])
def test_who_does_not_speak_redis_is_away(
    serve: Callable[[Reader, Writer], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("CALL_SECONDS", "CONNECT_SECONDS"):
        monkeypatch.setattr(redis_link, bound, 0.2)
    tries = 0

    async def noted(reader: Reader, writer: Writer) -> None:
        nonlocal tries
        tries += 1
        await serve(reader, writer)

    async def main() -> None:
        server = await asyncio.start_server(noted, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        link = RedisLink(url, "test:", "w", time.monotonic)
        async with link.running():
            await until(lambda: tried(2))
            assert not link.is_up
            with pytest.raises(RedisAway):
                await link.run("heartbeat", [], [])
            with pytest.raises(RedisAway):
                await link.send("nobody", b"here")
        server.close()

    async def tried(times: int) -> bool:
        return tries >= times

    asyncio.run(main())


def test_a_hanging_redis_ends_all_calls_within_their_limit(tmp_path: Path) -> None:
    """Those that wait for a connection too; who asks later is refused at once, and it is found again."""

    async def main(server: RedisServer) -> None:
        async with World(server).worker() as (link, _):
            server.hang()
            calls = [echo(link, "here", places=bool(number % 2)) for number in range(40)]
            answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
            assert all(isinstance(answer, RedisAway) for answer in answers)
            assert not link.is_up
            with pytest.raises(RedisAway, match="is away"):
                await link.send("nobody", b"here")
            server.wake()
            await until(lambda: is_up(link))
            assert await echo(link, "again") == b"again"
            assert not [task for task in link._in_flight if not task.done()]

    with redis_server(tmp_path) as server:
        for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
            with asyncio.Runner(loop_factory=loop) as runner:
                runner.run(main(server))


def test_killed_connections_are_made_anew(shared_redis: RedisServer) -> None:
    """On both loops, whichever of them is killed and whatever is under way."""

    async def main() -> None:
        async with World(shared_redis).worker() as (link, _):
            for _ in range(5):
                calls = [asyncio.ensure_future(echo(link, "here", places=bool(number % 2))) for number in range(20)]
                await asyncio.sleep(0)
                shared_redis.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
                assert all(answer == b"here" or isinstance(answer, RedisAway) for answer in answers)
                await until(lambda: is_up(link))
            for number in range(2 * redis_link.CONNECTIONS):  # none is lost from its pool
                assert await echo(link, "there", places=bool(number % 2)) == b"there"

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())


def test_a_process_that_stood_still_reads_what_has_come(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock says that the answer is overdue, but it was there in time."""
    monkeypatch.setattr(redis_link, "CALL_SECONDS", 0.2)

    async def main() -> None:
        async with World(shared_redis).worker() as (link, _):
            await echo(link, "connected")
            answer = asyncio.ensure_future(echo(link, "there"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251  (that is the point)
            assert await answer == b"there"

    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(main())


def test_reservations_wait_for_no_others(shared_redis: RedisServer) -> None:
    async def main() -> None:
        async with World(shared_redis).worker() as (link, _):
            held = [
                asyncio.ensure_future(asked(link._client, link, "BLPOP", link.key(f"none{number}"), "0"))
                for number in range(redis_link.CONNECTIONS)
            ]
            await asyncio.sleep(0.1)
            assert await echo(link, "here", places=True) == b"here"
            assert not any(call.done() for call in held)
            for call in held:
                call.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("answers", [True, False], ids=["others answered", "silent"])
def test_an_answer_that_comes_late_is_no_lost_redis(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Unless nothing else has been answered for as long."""
    monkeypatch.setattr(redis_link, "HEARTBEAT_SECONDS", 60.0)  # nothing is answered but what is asked here
    clock = Clock()

    async def main() -> None:
        async with World(shared_redis).worker() as (link, _):
            link.clock = clock
            assert await echo(link, "here") == b"here"
            monkeypatch.setattr(redis_link, "CALL_SECONDS", 0.2)
            waits = asyncio.ensure_future(asked(link._client, link, "BLPOP", link.key("none"), "0"))
            await asyncio.sleep(0)
            clock.now += 0.3
            if answers:
                assert await echo(link, "here", places=True) == b"here"
            with pytest.raises(RedisAway):
                await waits
            assert link.is_up is answers

    asyncio.run(main())
