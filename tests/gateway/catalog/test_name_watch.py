"""Names that are kept until the registry's epoch says that they may have changed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from adapters import epoch as epochs
from adapters.epoch import DIRTY_SECONDS, EPOCH_KEY, MAX_MARKS, mark, read_epoch, update_marked
from adapters.local_store import LocalStore
from adapters.records import read_record
from gateway.catalog.cache import GraceCache
from gateway.catalog.name_watch import NameWatch
from gateway.catalog.threads import StoreThreads

KEYS = [f"tenants/teas/functions/f{number}/function.json" for number in range(5)]


class Record(msgspec.Struct, frozen=True):
    value: int = 0


class Store(LocalStore):
    time = 1e9

    def now(self) -> float:
        return self.time


class World:
    """A gateway's cache before a store, by one clock that stands still but for the test; the store's is elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.now = 0.0
        self.loads = 0
        self.start()

    def start(self) -> None:
        """The gateway knows nothing."""
        self.watch = NameWatch(self.store, StoreThreads(10.0), lambda: self.now, 1.0)
        self.cache: GraceCache[str, int] = GraceCache(
            self._load, clock=lambda: self.now, fresh=1.0, grace=60.0, confirmed=self.watch.confirmed
        )
        self.watch.on_mark = lambda mark: self.cache.forget_where(lambda key: key == mark.key)
        self.watch.forget_all = lambda: self.cache.forget_where(lambda _: True)

    async def _load(self, key: str) -> int:
        self.loads += 1
        return value_of(self.store, key)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.store.time += seconds

    def poll(self) -> None:
        self.watch.apply(*self.watch.read(), self.now)

    def settle(self) -> None:
        """Until nothing is taken for changed any more."""
        self.poll()
        self.passes(DIRTY_SECONDS + 1)
        self.poll()

    async def keeps(self, key: str) -> bool:
        """Whether what is read of it now is not read again for minutes."""
        await self.cache.get(key)
        loads = self.loads
        for _ in range(20):
            self.passes(0.8)
            self.poll()
            await self.cache.get(key)
            await asyncio.sleep(0)
        return self.loads == loads


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def value_of(store: LocalStore, key: str) -> int:
    found = read_record(store, key, Record)
    return found[0].value if found else 0


def write(store: LocalStore, key: str, value: int) -> None:
    update_marked(store, key, Record, lambda _: Record(value))


def test_an_unmarked_name_is_not_read_again(world: World) -> None:
    async def main() -> None:
        world.settle()
        for _ in range(200):
            world.poll()
            world.passes(0.8)
            assert await world.cache.get(KEYS[0]) == 0
        assert world.loads == 1

    asyncio.run(main())


def test_what_was_committed_a_second_ago_is_answered(world: World) -> None:
    async def main() -> None:
        world.settle()
        assert await world.cache.get(KEYS[0]) == 0
        write(world.store, KEYS[0], 7)
        world.passes(0.8)
        world.poll()
        assert await world.cache.get(KEYS[0]) == 7

    asyncio.run(main())


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))])
def test_an_answer_is_never_older_than_a_second(world: World, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn writers, between whose mark and commit up to 100 s pass; drawn readings of the epoch that are late or fail,
    drawn starts, and drawn calls. In every second world marks are soon no longer named."""
    draw = random.Random(seed)
    monkeypatch.setattr(epochs, "MAX_MARKS", draw.choice([3, MAX_MARKS]))
    committed: dict[str, list[tuple[float, int]]] = {key: [(float("-inf"), 0)] for key in KEYS}
    coming: list[tuple[float, str, int]] = []

    async def main() -> None:
        for step in range(3000):
            world.passes(draw.choice([0.01, 0.1, 0.5, 0.5, 3.0]))
            for due in [each for each in coming if each[0] <= world.now]:
                coming.remove(due)
                world.store.put(due[1], msgspec.json.encode(Record(due[2])))
                committed[due[1]].append((world.now, due[2]))
            if draw.random() < 0.02:
                key = draw.choice(KEYS)
                mark(world.store, key)
                coming.append((world.now + draw.choice([0.0, 0.3, 5.0, 40.0, 100.0]), key, step))
            if draw.random() < 0.01:
                world.start()
            if draw.random() < 0.6:
                world.poll()
            key = draw.choice(KEYS)
            got = await world.cache.get(key)
            late = [value for when, value in committed[key] if when > world.now - 1.0]
            allowed = {*late, next(value for when, value in reversed(committed[key]) if when <= world.now - 1.0)}
            assert got in allowed
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_gateway_that_starts_believes_what_was_not_marked_lately(world: World) -> None:
    async def main() -> None:
        mark(world.store, KEYS[0])
        world.passes(DIRTY_SECONDS)
        mark(world.store, KEYS[1])
        world.start()
        world.poll()
        assert [await world.keeps(key) for key in KEYS[:3]] == [True, False, True]
        world.passes(DIRTY_SECONDS)
        world.poll()
        assert await world.keeps(KEYS[1])

    asyncio.run(main())


def test_a_gateway_that_starts_believes_nothing_when_marks_may_be_missing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because the epoch is new, or more was marked lately than it names."""
    monkeypatch.setattr(epochs, "MAX_MARKS", 3)

    async def believes() -> bool:
        world.start()
        world.poll()
        return await world.keeps(KEYS[4])

    async def main() -> None:
        assert not await believes()
        world.passes(DIRTY_SECONDS)
        assert await believes()
        for key in (KEYS[4], *KEYS[:3]):
            mark(world.store, key)
        assert not await believes()
        world.passes(DIRTY_SECONDS)
        assert await believes()

    asyncio.run(main())


def test_an_older_epoch_that_was_put_back_is_a_new_beginning(world: World) -> None:
    async def main() -> None:
        world.settle()
        mark(world.store, KEYS[1])
        saved = world.store.get(EPOCH_KEY).data
        for number in range(3):
            mark(world.store, KEYS[2 + number])
        world.passes(DIRTY_SECONDS)
        world.settle()
        assert await world.cache.get(KEYS[0]) == 0
        world.store.put(EPOCH_KEY, saved)
        write(world.store, KEYS[0], 7)
        world.passes(0.8)
        world.poll()
        assert await world.cache.get(KEYS[0]) == 7

    asyncio.run(main())


def test_after_missed_marks_everything_is_read_again(world: World) -> None:
    async def main() -> None:
        world.settle()
        assert [await world.cache.get(key) for key in KEYS] == [0] * 5
        write(world.store, KEYS[0], 7)
        for number in range(MAX_MARKS + 5):
            mark(world.store, f"tenants/other/functions/g{number}/function.json")
        world.passes(0.8)
        world.poll()
        assert await world.cache.get(KEYS[0]) == 7
        assert world.loads == 6

    asyncio.run(main())


@pytest.mark.parametrize("damage", [b"", b"{", b'{"id":"other","marks":[]}'])
def test_another_or_damaged_epoch_is_a_new_beginning(world: World, damage: bytes) -> None:
    async def main() -> None:
        world.settle()
        assert await world.cache.get(KEYS[0]) == 0
        world.store.put(KEYS[0], msgspec.json.encode(Record(7)))
        world.store.put(EPOCH_KEY, damage)
        mark(world.store, KEYS[1])
        world.passes(0.8)
        world.poll()
        assert await world.cache.get(KEYS[0]) == 7

    asyncio.run(main())


def _die_after_commit(folder: Path) -> None:
    write(LocalStore(folder), KEYS[0], 7)
    os._exit(9)


def test_a_writer_that_is_killed_before_it_tells(world: World, tmp_path: Path) -> None:
    async def main() -> None:
        world.settle()
        assert await world.cache.get(KEYS[0]) == 0
        writer = multiprocessing.get_context("spawn").Process(target=_die_after_commit, args=(tmp_path,))
        writer.start()
        await asyncio.to_thread(writer.join)
        world.passes(0.8)
        world.poll()
        assert await world.cache.get(KEYS[0]) == 7

    asyncio.run(main())


def test_300_hot_functions_cost_few_reads(world: World) -> None:
    """At one call of each every second, a worker reads less than 2.5 objects per second, the epoch's included."""

    async def main() -> None:
        world.settle()
        polls = 0
        for second in range(700):
            world.passes(1.0)
            world.poll()
            polls += 1
            for number in range(300):
                await world.cache.get(f"tenants/teas/functions/hot{number}/function.json")
            await asyncio.sleep(0)
            if second == 0:
                world.loads = 0
        assert (world.loads + polls / 0.8) / 700 < 2.5

    asyncio.run(main())


def test_racing_writers_lose_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(epochs, "MAX_MARKS", 1000)
    store = LocalStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: mark(store, f"k{number}"), range(100)))
    marks = read_epoch(store).marks
    assert [each.number for each in marks] == list(range(1, 101))
    assert {each.key for each in marks} == {f"k{number}" for number in range(100)}
