"""What gateway workers know of a node's residents, over drawn histories: posts are lost before or behind the gateway,
come late, go to any worker; Redis is emptied; processes start anew. In the end every worker knows what is there."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import AsyncExitStack
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, news, record, until

from cluster.news import FULL_REPORT, RECORD_EXPIRY, RECORD_INTERVAL, NodeRecord, NodeReport, Resident
from cluster.redis_link import RedisLink
from cluster.redis_state import RedisClusterState
from cluster.state import ClusterState
from node_agent.api.residency_log import ResidencyLog
from tests.support.redis_server import RedisServer

RESIDENTS = st.dictionaries(
    st.sampled_from("uvwxyz"), st.tuples(st.sampled_from(["device", "host", "disk"]), st.integers(0, 2)), max_size=5
)
STEPS = st.lists(
    st.tuples(st.just("hold"), RESIDENTS)
    | st.tuples(st.just("pool"), st.sampled_from(["", "a", "b"]))
    | st.tuples(st.sampled_from(["post", "post", "lost", "unheard", "late"]), st.integers(0, 1))
    | st.tuples(st.sampled_from(["empty", "restart"]), st.just(0)),
    max_size=25,
)


class Node:
    """As node_agent.api.publisher posts."""

    def __init__(self) -> None:
        self.epoch = self.seq = 0
        self.pool = ""
        self.residents: list[Resident] = []
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.log, self.known = ResidencyLog(), FULL_REPORT

    def record(self) -> NodeRecord:
        self.seq += 1
        return record(epoch=str(self.epoch), seq=self.seq, pool=self.pool).to_record()

    def news(self) -> NodeReport:
        return msgspec.convert(
            msgspec.to_builtins(self.log.news(self.record(), self.residents, self.known)), NodeReport, strict=False
        )

    def answered(self, news: NodeReport, taken: str) -> None:
        self.known = FULL_REPORT if taken == "gap" else news.changes.at


async def play(world: World, steps: list[tuple[str, object]]) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(world.open(expiry=RECORD_EXPIRY))
        second = (
            await stack.enter_async_context(world.open(expiry=RECORD_EXPIRY)) if world.server is not None else first
        )
        states, node, late = (first, second), Node(), list[NodeReport]()
        for what, with_what in steps:
            if what == "hold":
                assert isinstance(with_what, dict)
                node.residents = [Resident(digest, tier, 1, used) for digest, (tier, used) in with_what.items()]
            elif what == "pool":
                node.pool = str(with_what)
            elif what == "restart":
                node.start()
            elif what == "empty" and world.server is not None:
                world.server.client.flushdb()
            elif isinstance(with_what, int):
                news = node.news()
                if what == "late":
                    late.append(news)
                if what in ("post", "unheard"):
                    taken = await states[with_what % len(states)].publish(news)
                    if what == "post":
                        node.answered(news, taken)
                if what == "post" and late:
                    await states[-1 - with_what % len(states)].publish(late.pop())
        await converge(world, list(states), node)


async def converge(world: World, states: list[ClusterState], node: Node) -> None:
    async def agree() -> bool:
        await world.wait(RECORD_INTERVAL / 2)
        news = node.news()
        node.answered(news, await states[node.seq % len(states)].publish(news))
        wanted = {resident.digest: resident for resident in node.residents}
        found = [view for state in states for view in await state.nodes() if view.record.epoch == str(node.epoch)]
        return len(found) == len(states) and all(
            dict(view.residents) == wanted and view.record.pool == node.pool for view in found
        )

    await until(agree)


@given(STEPS)
def test_in_memory(steps: list[tuple[str, object]]) -> None:
    asyncio.run(play(World(None), steps))


@pytest.mark.hypothesis
def test_in_redis(shared_redis: RedisServer) -> None:
    @given(STEPS)
    def played(steps: list[tuple[str, object]]) -> None:
        asyncio.run(play(World(shared_redis), steps))

    played()


@pytest.mark.parametrize("count", [5000])
def test_a_worker_that_comes_late_hears_of_all(shared_redis: RedisServer, count: int) -> None:
    async def main() -> None:
        world, node = World(shared_redis), Node()
        node.residents = [Resident(f"{number:064x}", "host", 7, 0) for number in range(count)]
        async with world.worker() as (_, one):
            assert await one.publish(node.news()) == "taken"
            node.known = node.log.at
            node.residents = node.residents[1:]
            told = node.news()
            assert len(told.changes.residents) == 1
            assert await one.publish(told) == "taken"
            async with world.worker() as (_, two):
                found = (await two.nodes())[0].residents
                assert dict(found) == {resident.digest: resident for resident in node.residents}
                assert two._book.full_report("a").changes.at == node.log.at

    asyncio.run(main())


def test_calls_go_on_while_much_is_taken_in(shared_redis: RedisServer) -> None:
    """A worker that catches up, or hears much at once, does something else after each node."""
    nodes, heard, read = 8, list[int](), list[int]()

    async def watch(state: ClusterState, seen: list[int]) -> None:
        while True:
            seen.append(len(list(state._book.ids())))
            await asyncio.sleep(0)

    async def main() -> None:
        world = World(shared_redis)
        async with world.worker() as (_, one), world.worker() as (_, three):
            watching = [asyncio.create_task(watch(three, heard))]
            news_of_all = [one.publish(news(id=f"n{number}")) for number in range(nodes)]
            assert await asyncio.gather(*news_of_all) == ["taken"] * nodes
            await until(lambda: _knows(three, nodes))
            link = RedisLink(shared_redis.url, world.prefix, "late", time.monotonic)
            two = RedisClusterState(link, expiry=math.inf)
            watching.append(asyncio.create_task(watch(two, read)))
            async with link.running():
                await until(lambda: _knows(two, nodes))
            for task in watching:
                task.cancel()

    asyncio.run(main())
    for seen in (heard, read):
        assert max(after - before for before, after in pairwise(seen)) == 1


async def _knows(state: ClusterState, count: int) -> bool:
    return len(await state.nodes()) == count
