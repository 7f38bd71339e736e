"""What is special about the state in Redis: several workers, lost messages, Redis away, hung, emptied, back again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import World, record, until

from benchmarks.redis_server import RedisServer, redis_server
from cluster.node_table import Demand
from cluster.redis_link import RedisAway, check_redis, prefix_of
from cluster.redis_url import shown_url, url_problem
from cluster.state import ClusterState


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """To be killed."""
    with redis_server(tmp_path) as server:
        yield server


async def reserved(state: ClusterState) -> dict[str, int]:
    return {node.record.id: node.reserved for node in await state.nodes()}


async def agree(states: list[ClusterState], wanted: dict[str, int]) -> None:
    for state in states:

        async def as_wanted(state: ClusterState = state) -> bool:
            return await reserved(state) == wanted

        await until(as_wanted)


def test_workers_share_records_and_places(shared_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (_, one), world.worker() as (_, two):
            await one.publish(record(queue_limit=3))
            await agree([one, two], {"a": 0})
            assert await one.reserve("a", "r1", Demand(rank=4), 0)
            assert not await two.reserve("a", "r2", Demand(), 0), "its picture is older than the place that is taken"
            assert await reserved(two) == {"a": 1}, "and now it knows"
            assert await two.reserve("a", "r2", Demand(), 1)
            assert await one.reserve("a", "r3", Demand(), None)
            assert not await two.reserve("a", "r4", Demand(), None), "full"
            await two.publish(record(seq=2, queue_limit=3, acknowledged=["r1", "r3"]))
            await agree([one, two], {"a": 1})
            await two.release("a", "r2")
            await agree([one, two], {"a": 0})
            async with world.worker() as (_, late):
                assert await reserved(late) == {"a": 0}
                assert late._book.known("a") == record(seq=2, queue_limit=3, acknowledged=["r1", "r3"])

    asyncio.run(main())


def test_no_place_is_given_twice(shared_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (_, one), world.worker() as (_, two):
            await one.publish(record(queue_limit=10))
            await agree([one, two], {"a": 0})
            pairs = [(number, state) for number in range(20) for state in (one, two)]
            tries = [state.reserve("a", f"{number}-{id(state)}", Demand(), None) for number, state in pairs]
            assert sum(await asyncio.gather(*tries)) == 10
            await agree([one, two], {"a": 10})
            rows = [state._book.table.generation[0] for state in (one, two)]
            assert rows == [10, 10]

    asyncio.run(main())


def test_a_lost_message_is_noticed(shared_redis: RedisServer) -> None:
    """By the version, be it the next message's or, when none comes, at a sign of life."""

    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (link, state):
            await state.publish(record())
            table = await state.table()
            for number in (7, 8):
                shared_redis.client.hset(link.key("node", "a"), "generation", number)  # as if others had reserved
                shared_redis.client.incr(link.key("version"))
                if number == 7:
                    await state.publish(record(id="b"))
                await until(lambda number=number: _true(table.generation[0] == number))  # type: ignore[misc]

    asyncio.run(main())


async def _true(value: bool) -> bool:
    return value


def test_goes_on_without_redis_and_is_in_step_again(own_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(own_redis)
        async with world.worker(expiry=2.0) as (first, one), world.worker(expiry=2.0) as (second, two):
            await one.publish(record(queue_limit=2))
            await one.publish(record(id="b"))
            await agree([one, two], {"a": 0, "b": 0})
            own_redis.kill()
            assert await one.reserve("a", "r1", Demand(), 0)
            assert one.stale is not None
            await until(lambda: _true(two.stale is not None))
            assert await two.reserve("a", "r1", Demand(), 0), "each reserves for itself"
            await asyncio.sleep(2.2)
            assert set(await reserved(one)) == {"a", "b"}, "nobody could have told that they live"
            assert await one.silence("a", "1") < 2.0
            assert await one.publish(record(seq=2, running=7))
            assert not await one.publish(record(seq=1))
            own_redis.start()
            assert await first.wait_until_up(20) and await second.wait_until_up(20)
            assert one.stale is None
            assert "a" in await reserved(two), "whoever knew it gave it back"
            await agree([two], {})
            await agree([one], {})
            await two.publish(record(seq=3))
            await agree([one, two], {"a": 0})

    asyncio.run(main())


def test_stale_records_count_for_a_bounded_time(own_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(own_redis)
        async with world.worker(expiry=0.5) as (link, state):
            link._stale_seconds = 0.5
            await state.publish(record())
            own_redis.kill()
            await agree([state], {})
            assert state.stale is not None and state.stale >= 0.5

    asyncio.run(main())


def test_a_hung_redis_is_given_up(own_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(own_redis)
        async with world.worker() as (link, state):
            await state.publish(record())
            own_redis.hang()
            assert await state.reserve("a", "r1", Demand(), 0)
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
            await one.publish(record(queue_limit=5))
            await one.publish(record(id="b"))
            assert await one.reserve("a", "r1", Demand(), 0)
            await agree([one, two], {"a": 1, "b": 0})
            own_redis.empty()
            assert await two.reserve("a", "r2", Demand(), 1)
            await agree([one, two], {"a": 1, "b": 0})
            assert await one.publish(record(seq=2))
            assert await two.reserve("b", "r3", Demand(), None)
            await agree([one, two], {"a": 1, "b": 1})

    asyncio.run(main())


def test_an_emptied_redis_is_noticed_though_nothing_happens(own_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(own_redis)
        async with world.worker() as (link, state):
            await state.publish(record())
            own_redis.empty()
            await until(lambda: _true(bool(own_redis.client.exists(link.key("node", "a")))))

    asyncio.run(main())


def test_workers_that_went_leave_nothing_for_ever(shared_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (link, state):
            await state.publish(record())
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
