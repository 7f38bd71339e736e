"""Leases in memory and in a real Redis: one holder at a time, expiry, giving back; races between many."""

from __future__ import annotations

import asyncio

import pytest
from worlds import World, until

from cluster.leases import NOBODY, Leases, MemoryLeases, RedisLeases
from cluster.redis_link import RedisAway
from tests.support.redis_server import RedisServer


def run(world: World, main) -> None:
    async def opened() -> None:
        if world.server is None:
            await main(MemoryLeases(world.clock))
            return
        async with world.worker() as (link, _):
            await main(RedisLeases(link))

    asyncio.run(opened())


def test_one_holds_it_until_it_gives_it_back(world: World) -> None:
    async def main(leases: Leases) -> None:
        assert await leases.get("scaler") == NOBODY
        mine = await leases.take("scaler", "a", 60.0)
        assert (mine.holder, mine.seconds) == ("a", 60.0)
        theirs = await leases.take("scaler", "b", 60.0)
        assert theirs.holder == "a" and 0 < theirs.seconds <= 60.0
        assert (await leases.take("other", "b", 60.0)).holder == "b", "another lease"
        await leases.free("scaler", "b")
        assert (await leases.get("scaler")).holder == "a"
        assert (await leases.take("scaler", "a", 90.0)).seconds == 90.0, "prolonged"
        await leases.free("scaler", "a")
        assert await leases.get("scaler") == NOBODY
        assert (await leases.take("scaler", "b", 60.0)).holder == "b"

    run(world, main)


def test_it_ends_by_itself(world: World) -> None:
    async def main(leases: Leases) -> None:
        await leases.take("scaler", "a", 0.2)
        await world.wait(0.4)
        assert await leases.get("scaler") == NOBODY
        assert (await leases.take("scaler", "b", 60.0)).holder == "b"
        assert (await leases.take("scaler", "a", 60.0)).holder == "b", "who was late has lost it"

    run(world, main)


def test_of_many_at_once_one_gets_it(shared_redis: RedisServer) -> None:
    """Through several connections, again and again."""
    world = World(shared_redis)

    async def main() -> None:
        async with world.worker() as (one, _), world.worker() as (two, _), world.worker() as (three, _):
            states = [RedisLeases(link) for link in (one, two, three)]
            for turn in range(30):
                names = [f"{turn}-{number}" for number in range(9)]
                tries = [states[number % 3].take("scaler", name, 60.0) for number, name in enumerate(names)]
                holders = {lease.holder for lease in await asyncio.gather(*tries)}
                assert len(holders) == 1
                await states[turn % 3].free("scaler", holders.pop())

    asyncio.run(main())


def test_without_redis_nobody_gets_it(shared_redis: RedisServer) -> None:
    world = World(shared_redis)

    async def main() -> None:
        async with world.worker() as (link, _):
            leases = RedisLeases(link)
            await leases.take("scaler", "a", 60.0)
            link._lose(OSError("gone"))
            with pytest.raises(RedisAway):
                await leases.take("scaler", "a", 60.0)

            async def back() -> bool:
                return link.is_up

            await until(back)
            assert (await leases.get("scaler")).holder == "a"

    asyncio.run(main())
