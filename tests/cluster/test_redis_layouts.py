"""Two releases whose layouts differ use one Redis: neither meets the other's keys, and none is left for good."""

from __future__ import annotations

import asyncio

import pytest
from worlds import World, news

from cluster import redis_link
from cluster.leases import RedisLeases
from cluster.limits import Call, Charge, Owner
from cluster.node_table import Demand
from cluster.redis_limits import RedisLimits
from cluster.redis_link import prefix_of
from tests.support.redis_server import RedisServer

CALL = Call("acme", 60.0, 10, 1, (Owner("acme", 2),))
KINDS = {"workers", "version", "nodes", "node", "ends", "demands", "lease", "rates", "spent", "places"}


def test_layouts_keep_apart_and_leave_only_a_counter(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = World(shared_redis), World(shared_redis)
    newer.prefix = prefix_of("one cluster")
    monkeypatch.setattr(redis_link, "LAYOUT", redis_link.LAYOUT - 1)
    older.prefix = prefix_of("one cluster")

    async def main() -> None:
        async with older.worker() as (old_link, old), newer.worker() as (new_link, new):
            await old.publish(news(queue_limit=3))
            assert await old.reserve("a", "r1", Demand(rank=4), None)
            await RedisLeases(old_link).take("leader", "old", 60.0)
            await RedisLimits(old_link, 1).take(CALL)
            await RedisLimits(old_link, 1).spend("acme", [Charge("rps", 1.0)])
            assert await new.nodes() == []
            await new.publish(news(id="b"))
            assert [node.record.id for node in await old.nodes()] == ["a"]
            assert (await RedisLeases(new_link).get("leader")).holder == ""
            assert (old_link.workers, new_link.workers) == (1, 1)

    asyncio.run(main())
    with shared_redis.client as redis:
        kept = {key.decode().removeprefix(older.prefix): redis.pttl(key) for key in redis.keys(f"{older.prefix}*")}
    assert {key.partition(":")[0] for key in kept} == KINDS
    assert [key for key, left in kept.items() if left < 0] == ["version"]
