"""Places of tenants: how many one may hold, whose turn it is, and that none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ServiceError
from gateway.places.places import SERVICE, Places, Pool, owner_now, working_for
from tests.support.draws import draws


def places(size: int = 8, per_tenant: int = 2, waiting: int = 64) -> Places:
    return Places(Pool(name="p", work="cakes", size=size, per_tenant=per_tenant, waiting=waiting))


def test_a_tenant_holds_its_part_and_no_more() -> None:
    shared = places()
    with ExitStack() as stack:
        for tenant in ("a", "a", "b"):
            stack.enter_context(shared.hold_now(tenant))
        with pytest.raises(ServiceError, match="you have 2 cakes under way already, and may have 2") as refused:
            stack.enter_context(shared.hold_now("a"))
        assert (refused.value.type, refused.value.retry_after) == ("overloaded", 2.0)
        assert shared.in_use == 3
    assert shared.in_use == 0
    with shared.hold_now("a"):
        pass


def test_the_last_place_is_for_a_tenant_that_holds_none() -> None:
    shared = places(size=4, per_tenant=2)
    with ExitStack() as stack:
        for tenant in ("a", "b", "c"):
            stack.enter_context(shared.hold_now(tenant))
        assert not shared.has_room("a")
        assert shared.has_room("d")
        stack.enter_context(shared.hold_now("d"))
        with pytest.raises(ServiceError, match="all 4 places for cakes are taken by other tenants"):
            stack.enter_context(shared.hold_now("e"))


@pytest.mark.parametrize(("size", "per_tenant"), [(4, 4), (2, 2), (0, 1), (2, 0)])
def test_a_pool_that_one_tenant_could_fill_is_refused(size: int, per_tenant: int) -> None:
    with pytest.raises(ValueError, match="leave none for other tenants"):
        places(size, per_tenant)


def test_turns_go_to_the_tenant_that_holds_least_and_then_in_rotation() -> None:
    async def main() -> None:
        shared, order = places(size=2, per_tenant=1), list[str]()

        async def work(tenant: str) -> None:
            async with shared.hold(tenant, 60.0):
                order.append(tenant)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for tenant in ["a"] * 5 + ["b"] * 2 + ["c"]:
                tasks.create_task(work(tenant))
        assert order[:3] == ["a", "b", "c"]
        assert Counter(order) == {"a": 5, "b": 2, "c": 1}
        assert (shared.in_use, shared.waiting) == (0, 0)

    asyncio.run(main())


def test_waits_are_bounded_in_number_and_time() -> None:
    async def main() -> None:
        shared = places(size=2, per_tenant=1, waiting=1)
        with shared.hold_now("a"):
            waiter = asyncio.create_task(shared.acquire("a"))
            await asyncio.sleep(0)
            with pytest.raises(ServiceError, match="1 of your cakes are already waiting") as refused:
                await shared.acquire("a")
            assert (refused.value.type, refused.value.retry_after) == ("overloaded", 2.0)
            waiter.cancel()
            await asyncio.wait({waiter})
            with pytest.raises(ServiceError, match="you have 1 cakes"):
                async with shared.hold("a", 0.001):
                    pass
            async with shared.hold("b", 0.001):
                with pytest.raises(ServiceError, match="all 2 places for cakes are taken by other tenants"):
                    async with shared.hold("c", 0.001):
                        pass
        assert (shared.in_use, shared.waiting) == (0, 0)

    asyncio.run(main())


def test_a_tenant_is_told_that_the_last_place_is_for_others() -> None:
    shared = places(size=3, per_tenant=2)
    with ExitStack() as stack:
        for tenant in ("a", "b"):
            stack.enter_context(shared.hold_now(tenant))
        with pytest.raises(ServiceError, match="you have 1 cakes under way already, and the last place is kept"):
            stack.enter_context(shared.hold_now("a"))


def test_an_endless_row_of_new_tenants_overtakes_nobody_for_long() -> None:
    async def main() -> None:
        shared, new = places(size=2, per_tenant=1), (f"new-{number}" for number in count())
        for tenant in ("a", "b"):
            await shared.acquire(tenant)
        waits = asyncio.create_task(shared.acquire("a"))
        await asyncio.sleep(0)
        held = ["b", "a"]
        for _ in range(2 * shared.pool.size):
            asyncio.create_task(take(shared, next(new), held))  # noqa: RUF006 - it ends with the test
            await asyncio.sleep(0)
            shared.release(held.pop())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert waits.done()

    async def take(shared: Places, tenant: str, held: list[str]) -> None:
        await shared.acquire(tenant)
        held.append(tenant)

    asyncio.run(main())


def test_nothing_is_kept_of_a_tenant_that_waits_no_more() -> None:
    async def main() -> None:
        shared = places(size=2, per_tenant=1)
        await shared.acquire("b")
        for number in range(50):
            tenant = f"t{number}"
            await shared.acquire(tenant)
            waits = [asyncio.create_task(shared.acquire(name)) for name in (tenant, "c")]
            await asyncio.sleep(0)
            shared.release(tenant)  # for `c`, who had no turn
            waits[0].cancel()
            await asyncio.wait(waits)
            shared.release("c")
        kept = [value for value in vars(shared).values() if isinstance(value, dict)]
        assert [list(each) for each in kept if each] == [["b"]] * 2  # its place and its turn

    asyncio.run(main())


def test_the_service_itself_may_hold_all() -> None:
    shared = places(size=3, per_tenant=1)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(shared.hold_now(SERVICE))
        assert not shared.has_room(SERVICE)


def test_work_of_a_task_is_its_tenants() -> None:
    assert owner_now.get() == SERVICE
    with working_for("a"):
        assert owner_now.get() == "a"
    assert owner_now.get() == SERVICE


@settings(max_examples=draws(10), deadline=None)
@given(st.integers(2, 6), st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["end", "cancel"])), max_size=40))
def test_no_place_is_lost_and_no_bound_passed(size: int, drawn_work: list[tuple[str, str]]) -> None:
    async def main() -> None:
        shared, held = places(size, max(1, size // 2)), Counter[str]()

        async def work(tenant: str) -> None:
            await shared.acquire(tenant)
            held[tenant] += 1
            assert held.total() <= size
            assert held[tenant] <= shared.pool.per_tenant
            try:
                await asyncio.sleep(0)
            finally:
                held[tenant] -= 1
                shared.release(tenant)

        tasks = []
        for tenant, end in drawn_work:
            tasks.append(asyncio.create_task(work(tenant)))
            await asyncio.sleep(0)
            if end == "cancel":
                tasks[len(tasks) // 2].cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert not [task for task in tasks if not task.cancelled() and task.exception()]
        assert (shared.in_use, shared.waiting, held.total()) == (0, 0, 0)

    asyncio.run(main())
