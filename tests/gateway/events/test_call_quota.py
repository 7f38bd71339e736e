"""The quota of stored asynchronous calls: what counts, when it is counted, and what a store that is away does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from event_world import World, add_some, new_event, open_events, run

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.tenants import Limits, Tenant
from cluster.errors import ServiceError
from gateway.events import quota
from gateway.events.events import Events
from gateway.events.jobs import remove_old
from gateway.events.transitions import cancelled
from gateway.leader.tick import Tick


def limited(store: LocalStore, **limits: int) -> Events:
    async def account(tenant: str) -> Tenant:
        return Tenant(id=tenant, limits=Limits(**limits))

    return open_events(store, account_of=account)


async def counted(events: Events) -> None:
    """Waits for a count that is under way."""
    if (counting := events._quota._counts["acme"].counting) is not None:
        await asyncio.wait([counting])


async def refused(events: Events, number: int, tenant: str = "acme") -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await events.add(new_event(number, await events.clock.now(), tenant))
    return caught.value


def test_calls_of_all_states_count(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    async def work() -> None:
        events = limited(store, stored_calls=3)
        for event_id in await add_some(events, 2):
            await events.cancel("acme", event_id)
        await add_some(events, 1, first=2)
        error = await refused(events, 3)
        assert (error.type, error.status) == ("rate_limited", 429)
        assert error.retry_after is not None and error.retry_after >= 1
        assert "stored_calls" in error.message
        await add_some(events, 3, tenant="other")

    run(work())


def test_what_another_worker_stored_before_counts_at_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    async def work() -> None:
        await add_some(limited(store, stored_calls=5), 5)
        assert (await refused(limited(store, stored_calls=5), 9)).type == "rate_limited"

    run(work())


def test_what_another_worker_stores_meanwhile_counts_from_the_next_count_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)

    async def work() -> None:
        one, two = limited(store, stored_calls=10), limited(store, stored_calls=10)
        await add_some(one, 1)
        await add_some(two, 8, first=1)
        monkeypatch.setattr(quota, "COUNTED_FOR_S", 0.0)
        await add_some(one, 1, first=9)  # its count is begun by this one, in the background
        await counted(one)
        assert (await refused(one, 10)).type == "rate_limited"

    run(work())


def test_removed_calls_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)

    async def work() -> None:
        events = limited(world.store(), stored_calls=2)
        for event_id in await add_some(events, 2):
            await events.cancel("acme", event_id)
        await refused(events, 2)
        world.pass_time(2 * 86400)
        remove_old(events.store, Tick(float("inf"), lambda: 0.0, lambda: True))
        monkeypatch.setattr(quota, "RECOUNT_S", 0.0)
        with pytest.raises(ServiceError):  # it begins to count, and does not wait for it
            await events.add(new_event(3, await events.clock.now()))
        await counted(events)
        await add_some(events, 1, first=4)

    run(work())


def test_bytes_grow_with_results(tmp_path: Path) -> None:
    """A worker that begins counts what the records have grown to."""
    store = LocalStore(tmp_path)

    async def work() -> None:
        events = limited(store, stored_call_bytes=4000)
        await add_some(events, 2)
        for event_id in ("inv_0000", "inv_0001"):
            stored = events.store.find("acme", event_id)
            assert stored is not None
            ended = cancelled(stored.record, await events.clock.now())
            grown = {**ended.request, "prompt": "x" * 2000}
            assert events.store.change(stored, msgspec.structs.replace(ended, request=grown)) is not None
        assert "stored_call_bytes" in (await refused(limited(store, stored_call_bytes=4000), 2)).message

    run(work())


def test_a_store_that_can_not_be_listed_leaves_the_earlier_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlisted(LocalStore):
        away = False

        def list(self, prefix: str, after: str = "", limit: int = 1000):  # type: ignore[no-untyped-def]
            if self.away and prefix.startswith("tenants/"):
                raise StoreUnavailable("no lists")
            return super().list(prefix, after, limit)

    store = Unlisted(tmp_path)

    async def work() -> None:
        events = limited(store, stored_calls=3)
        await add_some(events, 2)
        store.away = True
        monkeypatch.setattr(quota, "COUNTED_FOR_S", 0.0)
        await add_some(events, 1, first=2)
        await counted(events)
        await refused(events, 3)

    run(work())
