"""Rates and places, in memory and in Redis; workers that share them, die, and lose Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import Clock, World, news, until

from cluster.limits import Bucket, Call, Charge, LimitState, MemoryLimits, Overspent, Owner, Refusal
from cluster.redis_limits import RedisLimits
from cluster.redis_link import RedisLink
from cluster.redis_state import RedisClusterState
from tests.support.redis_server import RedisServer, redis_server


def call(
    tenant: str = "acme",
    tokens: int = 0,
    places: int = 1,
    owners: dict[str, int] | None = None,
    tokens_per_minute: float | None = None,
) -> Call:
    return Call(tenant, tokens_per_minute, tokens, places, tuple(Owner(*owner) for owner in (owners or {}).items()))


def rps(rate: float, amount: float = 1.0) -> list[Charge]:
    return [Charge("rps", rate, amount)]


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


def test_requests_per_second(world: World) -> None:
    async def main() -> None:
        async with limits_of(world) as limits:
            assert await limits.spend("acme", rps(0.01)) is None
            refusal = await limits.spend("acme", rps(0.01))
            assert refusal is not None and refusal.charge == Charge("rps", 0.01)
            assert 90 < refusal.seconds <= 100  # one per 100 seconds
            assert await limits.spend("other", rps(0.01)) is None
            assert await limits.spend("acme", [Charge("reads_per_second", 0.01)]) is None, "another rate"
            assert await limits.spend("acme", []) is None

    asyncio.run(main())


def test_a_second_holds_as_many_requests_as_are_allowed(world: World) -> None:
    async def main() -> None:
        async with limits_of(world) as limits:
            outcomes = [await limits.spend("acme", rps(5)) for _ in range(5)]
            assert outcomes == [None] * 5
            await world.wait(0.25)
            assert await limits.spend("acme", rps(5)) is None

    asyncio.run(main())


def test_an_amount_of_more_than_a_second_needs_a_full_bucket_and_leaves_a_debt(world: World) -> None:
    async def main() -> None:
        async with limits_of(world) as limits:
            assert await limits.spend("acme", rps(10, 1000)) is None
            refusal = await limits.spend("acme", rps(10))
            assert refusal is not None and 98 < refusal.seconds <= 99.1

    asyncio.run(main())


def test_charges_are_taken_together_or_not_at_all(world: World) -> None:
    async def main() -> None:
        async with limits_of(world) as limits:
            text, reads = Charge("text_bytes_per_second", 0.01), Charge("reads_per_second", 0.02)
            assert await limits.spend("acme", [text]) is None
            refusal = await limits.spend("acme", [reads, text])
            assert isinstance(refusal, Overspent) and refusal.charge == text
            assert await limits.spend("acme", [reads]) is None, "nothing of it was taken"

    asyncio.run(main())


def test_tokens_are_charged_at_the_start_and_corrected_at_the_end(world: World) -> None:
    async def main() -> None:
        async with limits_of(world) as limits:
            asked = call(tokens=60, tokens_per_minute=100)
            assert await limits.take(asked) is None
            refusal = await limits.take(asked)
            assert refusal is not None and refusal.why == "tokens"
            assert refusal.seconds is not None and 8 < refusal.seconds <= 12  # 20 tokens are missing
            await limits.settle(asked, 50)
            assert await limits.take(asked) is None
            large = call(tokens=1000, tokens_per_minute=100)
            assert await limits.take(large) is not None, "it needs a full bucket"
            assert await limits.take(call("other", tokens=1000, tokens_per_minute=100)) is None

    asyncio.run(main())


def test_what_is_refused_takes_nothing(world: World) -> None:
    async def main() -> None:
        async with limits_of(world) as limits:
            full = {"acme": 5, "acme/f": 1}
            assert await limits.take(call(owners=full, tokens_per_minute=100, tokens=10)) is None
            refusal = await limits.take(call(owners=full, tokens_per_minute=100, tokens=10))
            assert refusal == Refusal("places", Owner("acme/f", 1))
            assert await limits.take(call(tokens_per_minute=100, tokens=90, owners={"acme": 2})) is None
            refusal = await limits.take(call(owners={"acme": 2}))
            assert refusal == Refusal("places", Owner("acme", 2))

    asyncio.run(main())


def test_places_are_taken_and_given_back(world: World) -> None:
    async def main() -> None:
        async with limits_of(world) as limits:
            asked = call(places=2, owners={"acme": 3})
            assert await limits.take(asked) is None
            assert await limits.take(asked) is not None
            assert await limits.take(call(owners={"acme": 3})) is None
            await limits.settle(asked, 0)
            assert await limits.take(asked) is None

    asyncio.run(main())


@given(
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 20)), max_size=30),
)
def test_a_bucket_never_gives_more_than_its_rate(rate: float, asked: list[tuple[float, float]]) -> None:
    """Over any time: what it held, and the rate times the time."""
    now, given_away = 0.0, 0.0
    bucket = Bucket(rate, rate * 2, now)
    for seconds, amount in asked:
        now += seconds
        bucket.adjust(rate, rate * 2, now)
        amount = min(amount, rate * 2)
        wait = bucket.wait(amount)
        if wait == 0:
            bucket.change(-amount)
            given_away += amount
        else:
            later = now + wait * 1.000001
            bucket.adjust(rate, rate * 2, later)
            assert bucket.wait(amount) == pytest.approx(0, abs=1e-6), "what it said was true"
            now = later
    assert given_away <= rate * 2 + rate * now + 1e-6


def test_full_buckets_are_forgotten() -> None:
    async def main() -> None:
        clock = Clock()
        limits = MemoryLimits(clock)
        for number in range(5000):
            clock.now += 1
            assert await limits.take(call(f"t{number}", tokens_per_minute=60, tokens=1)) is None
            assert await limits.spend(f"t{number}", rps(1)) is None
        assert len(limits._buckets) < 1100

    asyncio.run(main())


class TestSharedByWorkers:
    def test_each_limit_holds_for_all_of_them(self, shared_redis: RedisServer) -> None:
        async def main() -> None:
            async with two_workers(World(shared_redis)) as ((_, one), (_, two)):
                asked = (limits.spend("acme", rps(0.001)) for limits in (one, two) for _ in range(10))
                assert (await asyncio.gather(*asked)).count(None) == 1
                crowd = call("crowd", owners={"crowd": 7})
                outcomes = await asyncio.gather(*(limits.take(crowd) for limits in (one, two) for _ in range(10)))
                assert outcomes.count(None) == 7
                tokens = call("words", tokens=10, tokens_per_minute=55)
                outcomes = await asyncio.gather(*(limits.take(tokens) for limits in (one, two) for _ in range(10)))
                assert outcomes.count(None) == 5

        asyncio.run(main())

    def test_the_places_of_a_dead_worker_are_free(self, shared_redis: RedisServer) -> None:
        async def main() -> None:
            async with two_workers(World(shared_redis), 1) as ((link, limits),):
                asked, client = call(owners={"acme": 2}), shared_redis.client
                client.hset(link.key("places", "acme"), "another", 2)
                now = int(client.time()[0]) * 1000
                client.zadd(link.key("workers"), {"another": now + 1000})
                assert await limits.take(asked) is not None
                client.zadd(link.key("workers"), {"another": now - 6000})
                assert await limits.take(asked) is None

        asyncio.run(main())

    def test_the_counts_of_a_dead_worker_go_and_those_of_long_calls_stay(
        self, shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("cluster.redis_limits.PLACES_SECONDS", 1)
        monkeypatch.setattr("cluster.redis_limits.RENEW_SECONDS", 0.0)

        async def main() -> None:
            async with two_workers(World(shared_redis), 1) as ((link, limits),):
                asked, client = call(owners={"acme": 2}), shared_redis.client
                assert await limits.take(asked) is None
                dead = link.key("places", "of-a-dead-worker")
                client.hset(dead, "another", 1)
                client.pexpire(dead, 1000)  # as its last call left it
                async with asyncio.timeout(60):
                    while client.exists(dead):  # noqa: ASYNC110 - Redis removes it by itself
                        await asyncio.sleep(0.05)
                    await asyncio.sleep(1.5)  # longer than a count stays without a renewal
                assert client.hgetall(link.key("places", "acme")) != {}
                assert client.pttl(link.key("places", "acme")) > 0
                await limits.settle(asked, 0)

        asyncio.run(main())

    def test_nothing_stays_of_idle_tenants(self, shared_redis: RedisServer) -> None:
        async def main() -> None:
            world = World(shared_redis)
            async with two_workers(world, 1) as ((link, limits),):
                for number in range(500):
                    asked = call(f"t{number}", tokens=1, tokens_per_minute=1e6, owners={f"t{number}": 9})
                    assert await limits.take(asked) is None
                    await limits.settle(asked, 1)
                    assert await limits.spend(f"t{number}", rps(1000)) is None
                client = shared_redis.client
                assert list(client.scan_iter(link.key("places", "*"))) == []
                for kind in ("rates", "spent"):
                    for key in client.scan_iter(link.key(kind, "*")):
                        assert client.pttl(key) != -1

        asyncio.run(main())

    def test_the_clock_of_redis_is_set_back(self, shared_redis: RedisServer) -> None:
        """A bucket that is empty until long after fills from now on, and Retry-After is true."""

        async def main() -> None:
            async with two_workers(World(shared_redis), 1) as ((link, limits),):
                client = shared_redis.client
                later = (int(client.time()[0]) + 3600) * 1000
                client.hset(link.key("spent", "acme/rps"), mapping={"level": "0", "at": later})
                refusal = await limits.spend("acme", rps(5))
                assert refusal is not None and refusal.seconds == 0.2
                await asyncio.sleep(0.25)
                assert await limits.spend("acme", rps(5)) is None
                client.hset(link.key("rates", "acme"), mapping={"tokens": "0", "at": later})
                asked = call(tokens=1, tokens_per_minute=300)
                exceeded = await limits.take(asked)
                assert exceeded is not None and exceeded.seconds == 0.2
                await asyncio.sleep(0.25)
                assert await limits.take(asked) is None

        asyncio.run(main())

    def test_a_rate_that_allows_next_to_nothing(self, shared_redis: RedisServer) -> None:
        async def main() -> None:
            async with two_workers(World(shared_redis), 1) as ((link, limits),):
                asked = call("mute", tokens=1000, tokens_per_minute=5e-324)
                assert await limits.take(asked) is None
                refusal = await limits.take(asked)
                assert refusal is not None and refusal.seconds is not None and refusal.seconds > 3600
                assert await limits.spend("slow", rps(1e-300)) is None
                overspent = await limits.spend("slow", rps(1e-300))
                assert overspent is not None and overspent.seconds > 3600
                assert link.is_up

        asyncio.run(main())


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
