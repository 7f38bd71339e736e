"""What is special about the state in Redis: several workers, lost messages, Redis away, hung, emptied, back again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from worlds import PATIENCE, World, agree, news, reserved, true, until

from cluster import redis_link
from cluster.node_table import Demand
from cluster.redis_link import RedisAway, check_redis, prefix_of
from cluster.redis_url import shown_url, url_problem
from tests.support.redis_server import RedisServer, redis_server


def test_a_lost_message_is_noticed(shared_redis: RedisServer) -> None:
    """By the version, be it the next message's or, when none comes, at a sign of life."""

    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (link, state):
            await state.publish(news())
            await agree([state], {"a": 0})
            table = await state.table()
            for number in (7, 8):
                shared_redis.client.hset(link.key("node", "a"), "generation", number)  # as if others had reserved
                shared_redis.client.incr(link.key("version"))
                if number == 7:
                    await state.publish(news(id="b"))
                await until(lambda number=number: true(table.generation[0] == number))  # type: ignore[misc]

    asyncio.run(main())


def test_a_lost_connection_of_the_messages_ends_no_call(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis ends it when messages pile up. It is made anew, and what it missed is found out."""
    monkeypatch.setattr(redis_link, "CALL_SECONDS", PATIENCE)

    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (link, state), world.worker() as (_, other):
            await state.publish(news())
            await agree([state, other], {"a": 0})
            call = asyncio.create_task(link._ask(link._client.execute_command("BLPOP", link.key("here"), 0)))
            await asyncio.sleep(0)
            assert shared_redis.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub") == 2
            assert await other.reserve("a", "r1", Demand(), None)
            await asyncio.sleep(0.2)  # for the loss to be noticed
            shared_redis.client.rpush(link.key("here"), "something")
            assert list(await call) == [link.key("here").encode(), b"something"]
            await agree([state, other], {"a": 1})
            assert link.is_up

    asyncio.run(main())


def test_a_call_too_many_ends_no_other(shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "MAX_ASKED", 3)

    async def main() -> None:
        async with World(shared_redis).worker() as (link, _):
            sent = [link.send("nobody", b"here") for _ in range(4)]
            *rest, last = await asyncio.gather(*sent, return_exceptions=True)
            assert rest == [None] * 3
            assert isinstance(last, RedisAway)
            assert link.is_up

    asyncio.run(main())


def test_goes_on_without_redis_and_is_in_step_again(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        redis_link, "WORKER_SECONDS", 900.0
    )  # no worker counts as held up when its clock is set forward

    async def main() -> None:
        world = World(own_redis)
        async with world.worker(expiry=40.0) as (first, one), world.worker(expiry=40.0) as (second, two):
            await one.publish(news(queue_limit=2))
            await one.publish(news(id="b"))
            await agree([one, two], {"a": 0, "b": 0})
            own_redis.kill()
            assert await one.reserve("a", "r1", Demand(), 0) == 0, "no numbers without Redis"
            assert one.stale is not None
            await until(lambda: true(two.stale is not None))
            assert await two.reserve("a", "r1", Demand(), 0) == 0, "each reserves for itself"
            world.workers_clock.seconds += 44.0
            assert set(await reserved(one)) == {"a", "b"}, "nobody could have told that they live"
            assert await one.seconds_since_report("a", "1") < 40.0
            assert await one.publish(news(seq=2, running=7)) == "taken"
            assert await one.publish(news(seq=1)) == "older"
            own_redis.start()
            assert await first.wait_until_up(20) and await second.wait_until_up(20)
            assert one.stale is None
            assert "a" in await reserved(two), "whoever knew it gave it back"
            # Whoever missed the first change takes in everything anew, with ages by Redis's own clock.
            await until(lambda: true(0 < one._version == two._version))
            world.workers_clock.seconds += 40.0
            await agree([two], {})
            await agree([one], {})
            assert await two.publish(news(seq=3)) == "taken"
            await agree([one, two], {"a": 0})

    asyncio.run(main())


def test_stale_records_count_for_a_bounded_time(own_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(own_redis)
        async with world.worker(expiry=60.0) as (link, state):
            link._stale_seconds = 20.0
            await state.publish(news())
            await agree([state], {"a": 0})
            own_redis.kill()
            await until(lambda: true(state.stale is not None))
            world.workers_clock.seconds += 60.0
            assert await reserved(state) == {"a": 0}
            world.workers_clock.seconds += 20.1
            await agree([state], {})
            assert state.stale is not None and state.stale >= 20.0

    asyncio.run(main())


def test_a_hung_redis_is_given_up(own_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(own_redis)
        async with world.worker() as (link, state):
            await state.publish(news())
            await agree([state], {"a": 0})
            own_redis.hang()
            assert await state.reserve("a", "r1", Demand(), 0) == 0
            assert state.stale is not None
            own_redis.wake()
            assert await link.wait_until_up(20)
            assert await state.reserve("a", "r2", Demand(), None)

    asyncio.run(main())


def test_redis_emptied(own_redis: RedisServer) -> None:
    """Nothing breaks off: the first who needs a node gives it back, and the others hear of it."""

    async def main() -> None:
        world = World(own_redis)
        async with world.worker() as (_, one), world.worker() as (_, two):
            await one.publish(news(queue_limit=5))
            await one.publish(news(id="b"))
            assert await one.reserve("a", "r1", Demand(), 0)
            await agree([one, two], {"a": 1, "b": 0})
            own_redis.empty()
            assert await two.reserve("a", "r2", Demand(), 1)
            await agree([one, two], {"a": 1, "b": 0})
            assert await one.publish(news(seq=2)) == "taken"
            assert await two.reserve("b", "r3", Demand(), None)
            await agree([one, two], {"a": 1, "b": 1})

    asyncio.run(main())


def test_the_clock_of_redis_is_set_back(shared_redis: RedisServer) -> None:
    """What it then has of a later time is held no longer than if it had come now."""

    async def main() -> None:
        world = World(shared_redis)
        client = shared_redis.client
        async with world.worker() as (link, state):
            await state.publish(news(queue_limit=1))
            later = (int(client.time()[0]) + 3600) * 1000
            client.zadd(link.key("ends", "a"), {"r1": later})
            client.hset(link.key("demands", "a"), "r1", b"0:" + msgspec.msgpack.encode(["held", "a", "r1", Demand()]))
            client.hset(link.key("node", "a"), "heard", later)
            async with world.worker(expiry=1.5, reservation_seconds=1.5) as (_, late):
                await agree([late], {"a": 1})
                assert await late.seconds_since_report("a", "1") < 1.5
                await agree([late], {})
            assert await state.reserve("a", "r2", Demand(), None)
            assert client.zrange(link.key("ends", "a"), 0, -1) == [b"r2"]
            client.zadd(link.key("workers"), {"dead": later})
            await until(lambda: true(client.zscore(link.key("workers"), "dead") < later))

    asyncio.run(main())


def test_an_emptied_redis_is_noticed_though_nothing_happens(own_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(own_redis)
        async with world.worker() as (link, state):
            await state.publish(news())
            await agree([state], {"a": 0})  # `publish` waits but a moment for its own message
            own_redis.empty()
            await until(lambda: true(bool(own_redis.client.exists(link.key("node", "a")))))

    asyncio.run(main())


def test_workers_that_went_leave_nothing_for_ever(shared_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (link, state):
            await state.publish(news())
            await state.reserve("a", "r1", Demand(), None)
            kept = {key for key in shared_redis.client.scan_iter(link.prefix + "*") if shared_redis.client.ttl(key) < 0}
        assert kept == {link.key("version").encode()}

    asyncio.run(main())


def test_redis_away_at_the_start(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, password="hush-hush")
    with pytest.raises(RedisAway) as caught:
        check_redis(server.url)
    assert f"redis://127.0.0.1:{server.port}/0 does not answer" in str(caught.value)
    with redis_server(tmp_path, password="hush-hush") as guarded:
        check_redis(guarded.url)
        with pytest.raises(RedisAway) as caught:
            check_redis(guarded.url.replace("hush-hush", "guess-work"))
    assert "guess" not in str(caught.value) and "hush" not in str(caught.value)


def test_passwords_are_not_shown() -> None:
    assert shown_url("redis://user:word@example.test:7/3?password=word") == "redis://example.test:7/3"
    assert shown_url("rediss://:word@[::1]:7/3") == "rediss://[::1]:7/3"
    assert shown_url("unix://:word@/run/redis.sock?db=2") == "unix:///run/redis.sock"
    for wrong in ("http://h", "redis://", "redis://:word@h:port", "redis://h/name", "redis://[h", "unix://", ""):
        assert url_problem(wrong).startswith("expected redis://")
    for right in ("redis://h", "rediss://user:word@h:7/3", "unix:///run/redis.sock?db=2"):
        assert url_problem(right) == ""
    assert prefix_of("a" * 40) != prefix_of("b" * 40)
