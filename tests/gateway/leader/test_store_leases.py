"""Leases in the object store: one holder at a time, whatever the hosts' clocks say and however slow the store is."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.open_store import open_store
from adapters.store import Object, ObjectStore
from cluster.leases import NOBODY
from gateway.leader.store_leases import StoreLeases

SECONDS = 6.0


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(tmp_path / "registry")
    request.getfixturevalue("s3_endpoint")
    return open_store(f"s3://garnish-tests/{tmp_path.name}")


def test_a_challenger_waits_by_its_own_clock_from_the_last_change_that_it_saw(store: ObjectStore) -> None:
    async def main() -> None:
        one, two = Clock(5.0), Clock(1e9)  # hosts that started at other times
        mine, theirs = StoreLeases(store, one), StoreLeases(store, two)
        assert await mine.get("leader") == NOBODY
        assert (await mine.take("leader", "a", SECONDS)).holder == "a"
        assert (await theirs.take("leader", "b", SECONDS)).holder == "a"
        two.now += 5.9
        assert (await theirs.take("leader", "b", SECONDS)).holder == "a"
        await mine.take("leader", "a", SECONDS)
        two.now += 0.2
        assert (await theirs.take("leader", "b", SECONDS)).holder == "a", "it has changed: counted from here on"
        two.now += 5.9
        assert (await theirs.take("leader", "b", SECONDS)).holder == "a"
        two.now += 0.2
        assert (await theirs.take("leader", "b", SECONDS)).holder == "b"
        one.now += 100
        assert (await mine.take("leader", "a", SECONDS)).holder == "b", "who was late has lost it"
        third = StoreLeases(store, Clock(7.0))
        assert (await third.take("leader", "c", SECONDS)).holder == "b", "seen for the first time: waits all of it"

    asyncio.run(main())


def test_it_is_given_back_by_its_holder_alone(store: ObjectStore) -> None:
    async def main() -> None:
        leases = StoreLeases(store, Clock())
        await leases.take("leader", "a", SECONDS)
        await leases.free("leader", "b")
        assert (await leases.get("leader")).holder == "a"
        await leases.free("leader", "a")
        assert await leases.get("leader") == NOBODY
        assert (await leases.take("leader", "b", SECONDS)).holder == "b"

    asyncio.run(main())


def test_of_many_at_once_one_gets_it(store: ObjectStore) -> None:
    async def main() -> None:
        for turn in range(5):
            many = [StoreLeases(store, Clock()) for _ in range(8)]
            held = await asyncio.gather(*(one.take(f"l{turn}", str(number), 60.0) for number, one in enumerate(many)))
            assert len({lease.holder for lease in held}) == 1

    asyncio.run(main())


def test_a_damaged_lease_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("leases/leader.json", b"{")
    with pytest.raises(StoreUnavailable, match=r"leases/leader\.json"):
        asyncio.run(StoreLeases(store, Clock()).take("leader", "a", SECONDS))


class Slow(LocalStore):
    """Time passes before and after each operation takes effect."""

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self.clock, self.delays = clock, [0.0]

    def _pass(self) -> None:
        self.clock.now += self.delays[0]
        self.delays.append(self.delays.pop(0))

    def get(self, key: str) -> Object:
        self._pass()
        try:
            return super().get(key)
        finally:
            self._pass()

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self._pass()
        try:
            return super().put_if_match(key, data, etag)
        finally:
            self._pass()

    def put_if_absent(self, key: str, data: bytes | Path) -> str:
        self._pass()
        try:
            return super().put_if_absent(key, data)
        finally:
            self._pass()


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 8), st.booleans()), max_size=25),
    delays=st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0, 7.0]), min_size=1, max_size=7),
)
def test_never_two_at_a_time(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, float, bool]], delays: list[float]
) -> None:
    """Drawn takes of three workers, drawn waits, a store that is slow at drawn moments."""

    async def main() -> None:
        time = Clock()
        store = Slow(tmp_path_factory.mktemp("registry"), time)
        store.delays = list(delays)
        offsets = [0.0, 1e6, -500.0]
        workers = [StoreLeases(store, lambda offset=offset: time.now + offset) for offset in offsets]  # type: ignore[misc]
        ends = [-math.inf] * 3
        for number, wait, free in steps:
            time.now += wait
            if free:
                ends[number] = -math.inf
                await workers[number].free("leader", str(number))
                continue
            asked = time.now
            held = await workers[number].take("leader", str(number), SECONDS)
            ends[number] = asked + held.seconds if held.holder == str(number) else -math.inf
            assert sum(end > time.now for end in ends) <= 1

    asyncio.run(main())
