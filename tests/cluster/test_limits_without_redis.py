"""Limits while Redis is away: each worker allows its share, and what it allowed is counted once Redis is back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from limit_workers import call, two_workers
from worlds import World, news, until

from cluster.redis_link import RedisLink
from cluster.redis_state import RedisClusterState
from tests.support.redis_server import RedisServer, redis_server


def test_places_are_counted_again_in_a_redis_that_was_emptied(tmp_path: Any) -> None:
    async def main() -> None:
        with redis_server(tmp_path) as server:
            world, asked = World(server), call(owners={"acme": 4})
            async with world.worker() as (_, state), two_workers(world) as ((link, one), (_, two)):
                await state.publish(news())
                for limits in (one, one, two):
                    assert await limits.take(asked) is None
                server.empty()
                places = link.key("places", "acme")
                await until(lambda: _as_told(sum(map(int, server.client.hvals(places))) == 3))
                assert await two.take(asked) is None
                assert await one.take(asked) is not None
                for limits in (one, one, two, two):
                    await limits.settle(asked, 0)
                assert not server.client.exists(places)

    asyncio.run(main())


def test_what_a_slow_redis_gave_to_nobody_is_free(tmp_path: Any) -> None:
    """It took the places, but its answer came too late, and this worker alone could not allow the call."""

    async def main() -> None:
        with redis_server(tmp_path) as server:
            asked = call(places=2, owners={"acme": 3})
            async with two_workers(World(server)) as ((link, one), _):
                assert await one.take(asked) is None
                await one.settle(asked, 0)
                server.hang()
                refusal = await one.take(asked)
                assert refusal is not None and not link.is_up
                server.wake()
                await until(lambda: _is_up(link))
                assert await one.take(asked) is None

    asyncio.run(main())


def test_tokens_are_given_back_where_they_were_taken(tmp_path: Any) -> None:
    """A call that began while Redis was away took none of the tokens there."""

    async def main() -> None:
        with redis_server(tmp_path) as server:
            whole = call(tokens=100, tokens_per_minute=100)
            half = call(tokens=50, tokens_per_minute=100)
            async with two_workers(World(server)) as ((link, one), _):
                assert await one.take(whole) is None
                server.hang()
                assert await one.take(half) is None, "its share"
                server.wake()
                await until(lambda: _is_up(link))
                await one.settle(half, 50)
                refusal = await one.take(half)
                assert refusal is not None and refusal.why == "tokens"
                await one.settle(whole, 60)
                assert await one.take(half) is None

    asyncio.run(main())


async def _as_told(value: bool) -> bool:
    return value


def test_a_worker_alone_gives_away_its_share_and_is_counted_again(tmp_path: Any) -> None:
    async def main() -> None:
        with redis_server(tmp_path) as server:
            world = World(server)
            asked = call(owners={"acme": 4})
            async with two_workers(world) as ((first, one), (second, two)):
                assert await one.take(asked) is None
                server.kill()
                assert await two.take(asked) is None
                assert await two.take(asked) is None
                assert await two.take(asked) is not None, "half of four"
                assert await one.take(asked) is None
                server.start()
                assert await first.wait_until_up(20) and await second.wait_until_up(20)
                assert await one.take(asked) is not None, "four are taken, and Redis knows it"
                await two.settle(asked, 0)
                assert await one.take(asked) is None
                server.kill()
                await one.settle(asked, 0)
                server.start()
                await until(lambda: _is_up(first, second))
                assert await two.take(asked) is None

    asyncio.run(main())


def test_workers_of_other_gateways_have_their_share_while_redis_is_away(tmp_path: Any) -> None:
    """Also when they are heard of one by one in a Redis that was emptied, and went away again."""

    async def main() -> None:
        with redis_server(tmp_path) as server:
            asked = call(owners={"acme": 6})
            async with two_workers(World(server), count=3, own=1) as workers:
                await until(lambda: _as_told(all(link.workers == 3 for link, _ in workers)))
                for _ in range(2):
                    server.kill()
                    await until(lambda: _as_told(not any(link.is_up for link, _ in workers)))
                    for _, limits in workers:
                        taken = [await limits.take(asked) for _ in range(3)]
                        assert [refusal is None for refusal in taken] == [True, True, False], "a third of six"
                        for _ in range(2):
                            await limits.settle(asked, 0)
                    server.start()
                    await until(lambda: _is_up(*(link for link, _ in workers)))

    asyncio.run(main())


def test_workers_that_have_ended_are_counted_no_longer(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.redis_link.WORKER_SECONDS", 2.0)

    async def main() -> None:
        world = World(shared_redis)
        async with two_workers(world, count=1) as ((link, _),):
            other = RedisLink(shared_redis.url, world.prefix, "other", asyncio.get_running_loop().time)
            RedisClusterState(other)
            async with other.running():
                await until(lambda: _as_told(link.workers == 2))
            await until(lambda: _as_told(link.workers == 1))

    asyncio.run(main())


async def _is_up(*links: RedisLink) -> bool:
    return all(link.is_up for link in links)
