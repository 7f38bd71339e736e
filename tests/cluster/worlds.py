"""Cluster states to run the same tests on: in memory with a clock of our own, and in a real Redis."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

import msgspec

from cluster.news import NodeReport
from cluster.redis_link import RedisLink
from cluster.redis_state import RedisClusterState
from cluster.state import ClusterState, MemoryClusterState
from tests.support.listed_record import ListedRecord, full_news
from tests.support.redis_server import RedisServer

PATIENCE = 20.0
RECORD = ListedRecord(
    id="a", epoch="1", seq=1, url="http://127.0.0.1:1", state="ready", base="b", base_id="base", max_context=100,
    running=0, queued=0, queue_limit=2, kv_blocks_free=10, kv_blocks=10, block_tokens=16,
)  # fmt: skip

_prefixes = count()


def record(**changed: Any) -> ListedRecord:
    return msgspec.structs.replace(RECORD, **changed)


def news(**changed: Any) -> NodeReport:
    """All that there is to tell of a node."""
    return full_news(record(**changed))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ahead:
    """This host's monotonic clock, set forward."""

    seconds = 0.0

    def __call__(self) -> float:
        return monotonic() + self.seconds


@dataclass
class World:
    """Where a test's states live: all that one world opens share what they know."""

    server: RedisServer | None

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.workers_clock = Ahead()
        """Of those that share a Redis, which has its own."""
        self.prefix = f"test{next(_prefixes)}:"

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[ClusterState]:
        if self.server is None:
            yield MemoryClusterState(self.clock, **options)
            return
        async with self.worker(**options) as (_, state):
            yield state

    @asynccontextmanager
    async def worker(self, **options: Any) -> AsyncIterator[tuple[RedisLink, RedisClusterState]]:
        """One more gateway worker, in step with the others."""
        assert self.server is not None
        link = RedisLink(self.server.url, self.prefix, f"w{next(_prefixes)}", self.workers_clock)
        state = RedisClusterState(link, **{"expiry": math.inf, "reservation_seconds": 60.0} | options)
        async with link.running():
            assert await link.wait_until_up(PATIENCE)
            yield link, state

    async def wait(self, seconds: float) -> None:
        if self.server is None:
            self.clock.now += seconds
        else:
            await asyncio.sleep(seconds)

    def run(self, main: Callable[[ClusterState], Awaitable[None]], **options: Any) -> None:
        async def opened() -> None:
            async with self.open(**options) as state:
                await main(state)

        asyncio.run(opened())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def reserved(state: ClusterState) -> dict[str, int]:
    return {node.record.id: node.reserved for node in await state.nodes()}


async def agree(states: list[ClusterState], wanted: dict[str, int]) -> None:
    for state in states:

        async def as_wanted(state: ClusterState = state) -> bool:
            return await reserved(state) == wanted

        await until(as_wanted)


async def true(value: bool) -> bool:
    return value


async def all_count(states: list[RedisClusterState], places: int) -> None:
    """Waits until each of the states counts this number of places on the node."""
    await until(lambda: true(all(state._book.generation("a") == places for state in states)))
