"""Windows that all gateway workers read, in a real Redis: against what each has counted, and when parts go away."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.redis_link import RedisAway, RedisLink
from gateway.workers import windows as module
from gateway.workers.attainment import SLICE_S, WINDOWS_S, Attainment, Promise
from gateway.workers.last_hour import MAX_FUNCTIONS, Counts, LastHour
from gateway.workers.pool_loads import PoolLoads
from gateway.workers.windows import SUMS_TOGETHER, Windows
from tests.support.redis_server import RedisServer, redis_server

PATIENCE = 30.0
HELD: dict[Promise, bool] = {"ttft": True, "all": True}
LATE: dict[Promise, bool] = {"ttft": False, "all": False}

_prefixes = count()


class Worker:
    """One gateway worker's counters. `back`: so many seconds ago it counts what it counts."""

    def __init__(self, link: RedisLink | None) -> None:
        self.link, self.back = link, 0.0
        clock = lambda: monotonic() - self.back  # noqa: E731
        self.hour, self.attainment, self.loads = LastHour(clock), Attainment(clock), PoolLoads(monotonic)
        self.windows = Windows(link, self.hour, self.attainment, self.loads)

    def call(self, function: str = "f", tokens: int = 1, back: float = 0.0) -> None:
        self.back = back
        self.hour.record("acme", function, Counts(invocations=1, completion_tokens=tokens, ttft_seconds=0.25))
        self.attainment.record("acme", HELD if tokens % 2 else LATE)
        self.back = 0.0

    async def calls(self, function: str = "f") -> int:
        return (await self.windows.last_hour("acme", function)).invocations

    async def flush(self) -> None:
        assert self.link is not None
        await self.windows._flush(self.link)

    async def flushed(self) -> None:
        """However often Redis is given up on meanwhile, as where all processes stand still: a second try counts
        nothing twice."""
        while True:
            await self.until_up()
            try:
                return await self.flush()
            except RedisAway:
                continue

    async def until_up(self) -> None:
        assert self.link is not None and await self.link.wait_until_up(PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as started:
        yield started


@asynccontextmanager
async def workers(server: RedisServer, many: int = 2) -> AsyncIterator[list[Worker]]:
    prefix = f"windows{next(_prefixes)}:"
    async with AsyncExitStack() as stack:
        made = [Worker(RedisLink(server.url, prefix, f"w{number}", monotonic)) for number in range(many)]
        for worker in made:
            assert worker.link is not None
            await stack.enter_async_context(worker.link.running())
            await worker.until_up()
        yield made


async def until(seen: Callable[[], Awaitable[int]], wanted: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await seen() != wanted:  # noqa: ASYNC110  (what another worker does raises no event here)
            await asyncio.sleep(0.05)


async def many_of(worker: Worker) -> int:
    return (await worker.windows.loads())[1]


def test_without_redis_a_worker_reads_its_own() -> None:
    async def main() -> None:
        alone = Worker(None)
        alone.call(tokens=2)
        alone.loads.track(monotonic()).wait("a", 1.0)
        async with alone.windows.running():
            assert await alone.calls() == 1
            assert [kept.share("all") for kept in await alone.windows.attainment("acme")] == [0.0] * 3
            assert list(await alone.windows.attained()) == ["acme"]
            loads, many = await alone.windows.loads()
        assert (loads["a"].open, many) == (1, 1)
        assert alone.hour.take_unreported(1) == [], "nothing is kept that nobody would take"

    asyncio.run(main())


def test_all_workers_read_the_same(server: RedisServer) -> None:
    async def main() -> None:
        async with workers(server, 3) as (one, two, reader):
            one.call(tokens=1)
            two.call(tokens=2)
            two.call("g")
            for writer in (one, two):
                await writer.flush()
            for worker in (one, two, reader):
                sums = await worker.windows.last_hour("acme", "f")
                assert (sums.invocations, sums.completion_tokens, sums.ttft_seconds) == (2, 3, 0.5)
                assert await worker.windows.last_hour("acme", "none") == Counts()
                kept = await worker.windows.attainment("acme")
                assert [(each.calls, each.share("all"), each.share("tpot")) for each in kept] == [(3, 2 / 3, None)] * 3
                assert await worker.windows.attained() == {"acme": kept}
                assert [each.calls for each in await worker.windows.attainment("nobody")] == [0] * 3

    asyncio.run(main())


def test_a_worker_tells_each_second_and_at_its_end(server: RedisServer) -> None:
    async def main() -> None:
        async with workers(server) as (one, two):
            async with one.windows.running():
                one.call()
                await until(two.calls, 1)
                one.call()
            assert await two.calls() == 2

    asyncio.run(main())


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from("fg"), st.integers(1, 9), st.floats(0, 5000), st.booleans()),
    max_size=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_sums_are_those_of_what_was_counted(
    server: RedisServer, steps: list[tuple[int, str, int, float, bool]]
) -> None:
    """Of drawn ages; those near the border of a window may be on either side, for the slices are Redis's."""

    async def main() -> None:
        async with workers(server) as pair:
            for number, function, tokens, back, flushes in sorted(steps, key=lambda step: -step[3]):
                pair[number].call(function, tokens, back)
                if flushes:
                    await pair[number].flush()
            for worker in pair:
                await worker.flush()
            for worker in pair:
                for function in "fg":
                    ages = [(back, tokens) for _, name, tokens, back, _ in steps if name == function]
                    sums = await worker.windows.last_hour("acme", function)
                    surely = sum(tokens for back, tokens in ages if back < 3600 - 180)
                    at_most = sum(tokens for back, tokens in ages if back < 3600 + 120)
                    assert surely <= sums.completion_tokens <= at_most
                for seconds, kept in zip(WINDOWS_S, await worker.windows.attainment("acme"), strict=True):
                    backs = [step[3] for step in steps]
                    surely = sum(back < seconds - 3 * SLICE_S for back in backs)
                    assert surely <= kept.calls <= sum(back < seconds + 2 * SLICE_S for back in backs)
            assert await pair[0].windows.attainment("acme") == await pair[1].windows.attainment("acme")

    asyncio.run(main())


def test_every_key_expires_with_its_window(server: RedisServer) -> None:
    async def main() -> str:
        async with workers(server, 1) as (worker,):
            worker.call(back=5000.0)
            worker.call()
            worker.loads.track(monotonic()).wait("a", 1.0)
            await worker.flush()
            assert worker.link is not None
            return worker.link.prefix

    prefix = asyncio.run(main())
    with server.client as redis:
        left = {key.decode().removeprefix(prefix): redis.pttl(key) / 1000 for key in redis.keys(f"{prefix}*")}
    kinds = {key.rpartition(":")[0]: seconds for key, seconds in left.items()}
    assert Counter(key.rpartition(":")[0] for key in left if key.startswith("sums")) == {
        "sums:hour": 1,
        "sums:attainment": 1,
    }, "what is older than its window is not kept"
    assert 3500 < kinds["sums:hour"] <= 3600 and 3500 < kinds["sums:attainment"] <= 3600
    assert 3500 < kinds["told"] <= 3600 and 0 < kinds["load"] <= module.LOAD_SECONDS


def test_redis_goes_and_comes_back_empty(own_server: RedisServer) -> None:
    """What it lost is told again, what was counted meanwhile is told then, and nothing twice."""

    async def main() -> None:
        async with workers(own_server) as (one, two):
            one.call()
            two.call()
            await one.flush()
            assert await two.calls() == 2
            own_server.kill()
            one.call()
            assert await one.calls() == 2, "its own"
            assert [kept.calls for kept in await two.windows.attainment("acme")] == [1] * 3
            assert (await two.windows.loads())[1] == 1
            own_server.start()
            for worker in (one, two):
                await worker.until_up()
            await one.flush()
            assert await two.calls() == 3
            own_server.empty()
            one.call()
            assert await one.calls() == 3, "of its own all"
            assert await two.calls() == 4
            assert await one.calls() == 4

    asyncio.run(main())


@pytest.mark.parametrize("hangs", [False, True])
def test_an_answer_that_is_lost_counts_nothing_twice(own_server: RedisServer, hangs: bool) -> None:
    async def main() -> None:
        async with workers(own_server) as (one, two):
            assert one.link is not None
            one.call()
            await one.flushed()
            one.call()
            run = one.link.run

            async def lost(*asked: Any) -> Any:
                await run(*asked)
                raise RedisAway("the answer was lost")

            if hangs:
                own_server.hang()
            else:
                one.link.run = lost  # type: ignore[method-assign,assignment]
            with pytest.raises(RedisAway):
                await one.flush()
            one.link.run = run  # type: ignore[method-assign]
            if hangs:
                own_server.wake()
            one.call()
            await one.flushed()
            await two.until_up()
            assert await two.calls() == 3

    asyncio.run(main())


def test_a_hung_redis_holds_nobody_up(own_server: RedisServer) -> None:
    async def main() -> None:
        async with workers(own_server, 1) as (worker,):
            worker.call()
            own_server.hang()
            try:
                async with asyncio.timeout(PATIENCE):
                    assert await asyncio.gather(*(worker.calls() for _ in range(50))) == [1] * 50
                    assert list(await worker.windows.attained()) == ["acme"]
            finally:
                own_server.wake()

    asyncio.run(main())


def test_what_is_kept_and_told_at_once_is_bounded(server: RedisServer) -> None:
    async def main() -> None:
        async with workers(server) as (one, two):
            for number in range(MAX_FUNCTIONS + 200):
                one.call(f"f{number}")
            two.call("late")
            await one.flush()
            await two.flush()
            assert one.link is not None
            with server.client as redis:
                sizes = [redis.hlen(key) for key in redis.keys(one.link.key("sums", "hour", "*"))]
            assert max(sizes) <= MAX_FUNCTIONS and sum(sizes) >= 4 * SUMS_TOGETHER

    asyncio.run(main())


def test_pool_loads_of_living_workers(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOAD_SECONDS", 1.0)

    async def main() -> None:
        async with workers(server) as (one, two):
            one.loads.track(monotonic()).wait("a", 1.0)
            two.loads.track(monotonic() - 50.0).wait("a", 2.0)
            two.loads.track(monotonic()).wait(None, None)
            await two.flush()
            found, many = await one.windows.loads()
            assert (found["a"].open, found["a"].backlog, found[None].open, many) == (2, 3.0, 1, 2)
            assert found["a"].queue_wait >= 50.0
            await until(lambda: many_of(one), 1)
            assert (await one.windows.loads())[0]["a"].open == 1, "it says nothing any more"

    asyncio.run(main())
