"""Rates and places, in memory and in Redis; workers that share them, and die."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limit_workers import call, limits_of, two_workers
from worlds import Clock, World

from cluster.limits import Bucket, Charge, MemoryLimits, Overspent, Owner, Refusal
from tests.support.redis_server import RedisServer


def rps(rate: float, amount: float = 1.0) -> list[Charge]:
    return [Charge("rps", rate, amount)]


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
