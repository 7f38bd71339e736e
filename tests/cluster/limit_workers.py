"""Workers of gateways that share limits in Redis, and calls that they limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from worlds import World

from cluster.limits import Call, LimitState, MemoryLimits, Owner
from cluster.redis_limits import RedisLimits
from cluster.redis_link import RedisLink
from cluster.redis_state import RedisClusterState


def call(
    tenant: str = "acme",
    tokens: int = 0,
    places: int = 1,
    owners: dict[str, int] | None = None,
    tokens_per_minute: float | None = None,
) -> Call:
    return Call(tenant, tokens_per_minute, tokens, places, tuple(Owner(*owner) for owner in (owners or {}).items()))


@asynccontextmanager
async def limits_of(world: World) -> AsyncIterator[LimitState]:
    if world.server is None:
        yield MemoryLimits(world.clock)
        return
    async with two_workers(world, 1) as ((_, limits),):
        yield limits


@asynccontextmanager
async def two_workers(world: World, count: int = 2, own: int = 2) -> AsyncIterator[list[tuple[RedisLink, RedisLimits]]]:
    assert world.server is not None
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            link = RedisLink(world.server.url, world.prefix, f"w{number}", asyncio.get_running_loop().time)
            RedisClusterState(link)
            found.append((link, RedisLimits(link, own)))
            await stack.enter_async_context(link.running())
            assert await link.wait_until_up(20)
        yield found
