"""Places on nodes that several workers take in Redis: none is given twice, and each is counted once."""

from __future__ import annotations

import asyncio

import pytest
from worlds import World, agree, all_count, news, reserved, true, until

from cluster.node_table import Demand
from cluster.received import Received
from cluster.redis_state import RedisClusterState
from tests.support.redis_server import RedisServer


def test_workers_share_records_and_places(shared_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (_, one), world.worker() as (_, two):
            await one.publish(news(queue_limit=3))
            await agree([one, two], {"a": 0})
            first = await one.reserve("a", "r1", Demand(rank=4), 0)
            assert not await two.reserve("a", "r2", Demand(), 0), "its picture is older than the place that is taken"
            assert await reserved(two) == {"a": 1}, "and now it knows"
            assert await two.reserve("a", "r2", Demand(), 1)
            third = await one.reserve("a", "r3", Demand(), None)
            assert not await two.reserve("a", "r4", Demand(), None), "full"
            assert first is not None and third is not None
            received = Received().with_one(first).with_one(third)
            await two.publish(news(seq=2, queue_limit=3, received=received))
            await agree([one, two], {"a": 1})
            await two.release("a", "r2")
            await agree([one, two], {"a": 0})
            async with world.worker() as (_, late):
                assert await reserved(late) == {"a": 0}
                assert late._book.full_report("a") == two._book.full_report("a")

    asyncio.run(main())


def test_no_place_is_given_twice(shared_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (_, one), world.worker() as (_, two):
            await one.publish(news(queue_limit=10))
            await agree([one, two], {"a": 0})
            pairs = [(number, state) for number in range(20) for state in (one, two)]
            tries = [state.reserve("a", f"{number}-{id(state)}", Demand(), None) for number, state in pairs]
            taken = [number for number in await asyncio.gather(*tries) if number is not None]
            assert len(set(taken)) == len(taken) == 10
            await agree([one, two], {"a": 10})
            rows = [state._book.table.generation[0] for state in (one, two)]
            assert rows == [10, 10]

    asyncio.run(main())


@pytest.mark.parametrize("at", ["before", "meanwhile", "hung", "emptied"])
def test_reservations_while_redis_fails(own_redis: RedisServer, at: str) -> None:
    """The place is then this worker's own, or is taken in the Redis that forgot the node, and counted once."""

    async def main() -> None:
        async with World(own_redis).worker() as (link, state):
            await state.publish(news(queue_limit=2))
            if at == "before":
                own_redis.kill()
                await until(lambda: true(state.stale is not None))
            elif at == "hung":
                own_redis.hang()
            elif at == "emptied":
                own_redis.client.flushall()
                own_redis.client.script_flush()
            reserving = asyncio.create_task(state.reserve("a", "r1", Demand(), None))
            if at == "meanwhile":
                await asyncio.sleep(0)
                own_redis.kill()
            assert await reserving is not None
            await agree([state], {"a": 1})
            if at == "emptied":
                assert own_redis.client.zcard(link.key("ends", "a")) == 1
            await state.release("a", "r1")
            await agree([state], {"a": 0})
            own_redis.wake()

    asyncio.run(main())


async def at_first_try(state: RedisClusterState, request_id: str) -> bool:
    return await state.reserve("a", request_id, Demand(), state._book.generation("a")) is not None


def test_places_are_taken_at_the_first_try_after_redis_was_emptied(own_redis: RedisServer) -> None:
    """It counts a node's places anew from then on."""

    async def main() -> None:
        world = World(own_redis)
        async with world.worker() as (_, one), world.worker() as (_, two):
            await one.publish(news(queue_limit=100))
            await agree([one, two], {"a": 0})
            for number in range(5):
                assert await at_first_try(one, f"before-{number}")
            await agree([one, two], {"a": 5})
            own_redis.empty()
            assert await one.reserve("a", "after", Demand(), None)
            await agree([one, two], {"a": 1})
            assert await at_first_try(one, "after-1")
            await all_count([one, two], 2)
            assert await at_first_try(two, "after-2")

    asyncio.run(main())


def test_places_are_taken_at_the_first_try_on_a_node_that_was_forgotten(shared_redis: RedisServer) -> None:
    async def main() -> None:
        world = World(shared_redis)
        short = {"forget_seconds": 2.0, "reservation_seconds": 1.9}
        async with world.worker(**short) as (_, one), world.worker(**short) as (_, two):
            await one.publish(news(queue_limit=100))
            await agree([one, two], {"a": 0})
            for number in range(5):
                assert await at_first_try(one, f"before-{number}")
            await all_count([one, two], 5)
            await asyncio.sleep(2.1)
            await one.publish(news(seq=2, queue_limit=100))
            await agree([one, two], {"a": 0})
            await all_count([one, two], 0)
            assert await at_first_try(one, "after")
            await all_count([one, two], 1)
            assert await at_first_try(two, "after-1")

    asyncio.run(main())


def test_drawn_orders_of_answers_and_messages(shared_redis: RedisServer) -> None:
    """Many reservations under way at once: whichever comes first, a worker's count is that of Redis in the end."""

    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (_, one), world.worker() as (_, two):
            await one.publish(news(queue_limit=1000))
            await agree([one, two], {"a": 0})
            for batch in range(10):
                tries = [s.reserve("a", f"{batch}-{n}-{id(s)}", Demand(), None) for n in range(20) for s in (one, two)]
                assert all(await asyncio.gather(*tries))
                await one.publish(news(seq=2 + batch, queue_limit=1000))
                await all_count([one, two], 40 * (batch + 1))
            assert not one._ahead and not two._ahead

    asyncio.run(main())


def test_a_place_of_a_caller_who_went_is_free(own_redis: RedisServer) -> None:
    """It went while Redis was asked for the place, which Redis gave it."""

    async def main() -> None:
        world = World(own_redis)
        async with world.worker() as (link, state):
            await state.publish(news(queue_limit=5))
            assert await state.reserve("a", "r0", Demand(), 0)
            own_redis.hang()
            reserving = asyncio.create_task(state.reserve("a", "r1", Demand(), 1))
            await asyncio.sleep(0.1)
            reserving.cancel()
            await asyncio.sleep(0.1)
            own_redis.wake()
            with pytest.raises(asyncio.CancelledError):
                await reserving
            assert own_redis.client.hget(link.key("node", "a"), "generation") == b"2", "it was given"
            assert own_redis.client.zrange(link.key("ends", "a"), 0, -1) == [b"r0"]
            await agree([state], {"a": 1})
            assert link.is_up

    asyncio.run(main())
