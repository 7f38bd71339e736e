"""The cache of keys and resolutions, by a clock of its own."""

from __future__ import annotations

import asyncio

import pytest

from adapters.errors import NotFound, StoreUnavailable
from gateway.catalog.cache import GraceCache


class Store:
    """Answers with how often it was asked, or raises."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = 0
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def load(self, key: str) -> int:
        self.asked += 1
        mine = self.asked
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return mine


@pytest.fixture
def store() -> Store:
    return Store()


def cache_of(store: Store, limit: int = 10) -> GraceCache[str, int]:
    return GraceCache(store.load, clock=lambda: store.now, fresh=1.0, grace=60.0, limit=limit)


def test_an_answer_is_kept_for_a_second(store: Store) -> None:
    async def main() -> None:
        cache = cache_of(store)
        assert await cache.get("a") == 1
        store.now = 0.99
        assert await cache.get("a") == 1
        store.now = 1.0
        assert await cache.get("a") == 2

    asyncio.run(main())


def test_an_answer_that_is_asked_for_is_renewed_before_it_is_old(store: Store) -> None:
    async def main() -> None:
        cache = cache_of(store)
        await cache.get("a")
        store.now, store.gate = 0.6, asyncio.Event()
        assert [await cache.get("a"), await cache.get("a")] == [1, 1], "it does not wait"
        await asyncio.sleep(0)
        assert store.asked == 2, "and asks once"
        store.gate.set()
        await asyncio.sleep(0.01)
        store.now = 1.5
        assert await cache.get("a") == 2, "which counts from when it was asked"
        store.now = 1.7
        assert await cache.get("a") == 3

    asyncio.run(main())


def test_only_a_final_answer_is_confirmed(store: Store) -> None:
    async def main() -> None:
        cache: GraceCache[str, int] = GraceCache(
            store.load,
            clock=lambda: store.now,
            fresh=1.0,
            grace=60.0,
            confirmed=lambda _: store.now,
            is_final=lambda answer: answer == 2,
        )
        assert await cache.get("a") == 1
        store.now = 1.0
        assert await cache.get("a") == 2
        store.now = 10_000.0
        assert await cache.get("a") == 2
        await asyncio.sleep(0)
        assert store.asked == 2

    asyncio.run(main())


def test_a_miss_is_asked_again_at_once(store: Store) -> None:
    async def main() -> None:
        cache = cache_of(store)
        store.error = NotFound("no")
        with pytest.raises(NotFound):
            await cache.get("a")
        store.error = None
        assert await cache.get("a") == 2

    asyncio.run(main())


def test_the_grace_ends(store: Store) -> None:
    async def main() -> None:
        cache = cache_of(store)
        await cache.get("a")
        store.error = StoreUnavailable("away")
        store.now = 59.0
        assert await cache.get("a") == 1
        with pytest.raises(StoreUnavailable):
            await cache.get("unknown")
        store.now = 60.0
        with pytest.raises(StoreUnavailable):
            await cache.get("a")

    asyncio.run(main())


def test_a_registry_that_hangs_holds_up_only_what_is_unknown(store: Store) -> None:
    async def main() -> None:
        cache = GraceCache(store.load, clock=lambda: store.now, fresh=1.0, grace=60.0, patience=0.01)
        assert await cache.get("a") == 1
        store.now, store.gate = 2.0, asyncio.Event()
        assert await cache.get("a") == 1
        unknown = asyncio.ensure_future(cache.get("b"))
        store.gate.set()
        assert await unknown == 3
        assert await cache.get("a") == 2  # the load that hung has come to its end

    asyncio.run(main())


def test_what_is_gone_has_no_grace(store: Store) -> None:
    async def main() -> None:
        cache = cache_of(store)
        await cache.get("a")
        store.now, store.error = 2.0, NotFound("deleted")
        with pytest.raises(NotFound):
            await cache.get("a")
        store.error = StoreUnavailable("away")
        with pytest.raises(StoreUnavailable):
            await cache.get("a")

    asyncio.run(main())


def test_one_load_serves_all_who_wait(store: Store) -> None:
    async def main() -> None:
        cache, store.gate = cache_of(store), asyncio.Event()
        waiting = [asyncio.ensure_future(cache.get("a")) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # one of them goes; the others still get theirs
        store.gate.set()
        assert await asyncio.gather(*waiting[1:]) == [1] * 4

    asyncio.run(main())


def test_a_load_from_before_forgetting_does_not_count(store: Store) -> None:
    async def main() -> None:
        cache, store.gate = cache_of(store), asyncio.Event()
        before = asyncio.ensure_future(cache.get("a"))
        await asyncio.sleep(0)
        cache.forget_where(lambda key: key == "a")
        after = asyncio.ensure_future(cache.get("a"))
        await asyncio.sleep(0)
        store.gate.set()
        assert (await before, await after) == (1, 2)
        assert await cache.get("a") == 2

    asyncio.run(main())


def test_it_is_bounded(store: Store) -> None:
    async def main() -> None:
        cache = cache_of(store, limit=2)
        for key in "abc":
            await cache.get(key)
        assert await cache.get("c") == 3
        assert await cache.get("a") == 4

    asyncio.run(main())


def test_a_load_that_hangs_holds_up_nobody_twice(store: Store) -> None:
    async def main() -> None:
        cache: GraceCache[str, int] = GraceCache(
            store.load, clock=lambda: store.now, fresh=1.0, grace=60.0, patience=0.01
        )
        assert await cache.get("a") == 1
        store.now, store.gate = 2.0, asyncio.Event()
        assert await cache.get("a") == 1
        cache.patience = 3600.0
        async with asyncio.timeout(60):
            assert await cache.get("a") == 1
        store.gate.set()
        await asyncio.gather(*cache._loading.values())
        assert await cache.get("a") == 2
        assert not cache._patience_ends

    asyncio.run(main())
