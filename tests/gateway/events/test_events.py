"""Events in a store: queues with limits, fair shares, several workers, and orderly ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from event_world import World, add_some, all_ended, leftovers, make_worker, new_event, open_events, run

from adapters.destinations import Destination
from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from cluster.errors import ServiceError
from gateway.catalog.threads import StoreThreads
from gateway.events import event_store, jobs, worker
from gateway.events import events as events_module
from gateway.events.event_store import EventStore
from gateway.events.jobs import KEPT_S, event_jobs, remove_old
from gateway.events.records import EventRecord, markers_of
from gateway.events.transitions import cancelled, claimed, expired
from gateway.events.worker import event_poller
from gateway.jobs import poller
from gateway.jobs.clocks import OFFSET_VALID_S, StoreClock
from gateway.jobs.job_store import Stored
from gateway.jobs.poller import PollResult
from gateway.leader.tick import Tick, TickEnded


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "registry")


def test_the_store_s_time_goes_on_while_the_store_is_away(world: World) -> None:
    async def work() -> None:
        seconds = 1000.0
        store = world.store()
        clock = StoreClock(store, StoreThreads(10.0, 1), lambda: seconds)
        began = await clock.now()
        store.now = _away
        seconds += 2 * OFFSET_VALID_S
        assert await clock.now() == began + 2 * OFFSET_VALID_S
        with pytest.raises(StoreUnavailable):
            await StoreClock(store, StoreThreads(10.0, 1), lambda: seconds).now()

    run(work())


def _away() -> float:
    raise StoreUnavailable("away")


def test_a_full_queue_takes_no_more(world: World) -> None:
    async def work() -> None:
        events = open_events(world.store(), max_queued=3)
        await add_some(events, 3)
        with pytest.raises(ServiceError, match="3 asynchronous calls waiting") as refused:
            await add_some(events, 1, first=9)
        assert refused.value.type == "overloaded"
        await add_some(events, 1, "other", first=9)

    run(work())


@pytest.mark.parametrize("lost", ["put_if_match", "delete"])
def test_a_change_whose_answer_was_lost_can_be_made_again(tmp_path: Path, lost: str) -> None:
    class Forgetful(LocalStore):
        """Does as it is asked, and fails."""

    def fail_once(store: Forgetful, *arguments: Any) -> None:
        delattr(Forgetful, lost)
        getattr(store, lost)(*arguments)
        raise StoreUnavailable("the answer is lost")

    setattr(Forgetful, lost, fail_once)
    store = EventStore(Forgetful(tmp_path / "registry"))
    now = store.objects.now()
    stored = store.add(new_event(1, now, on_failure=Destination(function="pirate")))
    assert stored is not None
    ended = expired(stored.record, now)
    with pytest.raises(StoreUnavailable):
        store.change(stored, ended)
    assert store.change(stored, ended) == store.find("acme", ended.id)
    assert {info.key for info in store.objects.list("events/")} == markers_of(ended)
    assert len(markers_of(ended)) == 2
    assert store.change(stored, cancelled(stored.record, now)) is None
    assert {info.key for info in store.objects.list("events/")} == markers_of(ended)


def test_two_workers_run_each_event_once(world: World) -> None:
    async def work() -> None:
        several = [open_events(world.store()) for _ in range(2)]
        ids = await add_some(several[0], 40)
        workers = [make_worker(world, events, lambda *_: None) for events in several]
        async with workers[0].running(), workers[1].running():
            found = await all_ended(several[0], ids)
        assert [event.state for event in found] == ["succeeded"] * 40
        assert set(world.runs.values()) == {1}
        assert not leftovers(world.store())
        assert not list(world.store().list("events/workers/"))

    run(work())


def test_two_workers_on_s3(world: World, new_s3_store: Callable[[], Any]) -> None:
    async def work() -> None:
        store = new_s3_store()
        several = [open_events(store) for _ in range(2)]
        ids = await add_some(several[0], 6)
        workers = [make_worker(world, events, lambda *_: None) for events in several]
        async with workers[0].running(), workers[1].running():
            found = await all_ended(several[0], ids)
            page = await several[1].list("acme", ("succeeded",), "pirate", "", 4)
            rest = await several[1].list("acme", ("succeeded",), "pirate", page.after or "", 4)
        assert [event.state for event in found] == ["succeeded"] * 6
        assert sorted(event.id for event in (*page.events, *rest.events)) == ids
        assert set(world.runs.values()) == {1}
        tick = Tick(float("inf"), lambda: 0.0, lambda: True)
        later = store.now() + KEPT_S + 60
        store.now = lambda: later
        remove_old(EventStore(store), tick)
        assert tick.work == 6
        assert not store.list("")

    run(work())


def test_a_flood_of_one_tenant_delays_no_other(world: World) -> None:
    """Of the first events that begin, as many are of the tenant with few as of the one with many."""

    async def work() -> None:
        events, begun = open_events(world.store()), []
        enough, release = asyncio.Event(), asyncio.Event()

        async def handle(stored: Stored[EventRecord]) -> None:
            begun.append(stored.record.tenant)
            if len(begun) == 8:
                enough.set()
            await release.wait()

        await add_some(events, 20, "flood")
        await add_some(events, 4, "quiet", first=100)
        task = asyncio.create_task(event_poller(events, "queued", handle, at_once=8).run())
        await enough.wait()
        task.cancel()
        release.set()
        assert begun.count("quiet") == 4

    run(work())


def test_a_full_worker_rests_although_more_is_queued(world: World) -> None:
    async def work() -> None:
        events, began, rounds = open_events(world.store()), asyncio.Event(), 0

        async def handle(_: Stored[EventRecord]) -> None:
            began.set()
            await asyncio.Event().wait()

        full = event_poller(events, "queued", handle, at_once=1)
        begin = full._round

        async def counted() -> float:
            nonlocal rounds
            rounds += 1
            return await begin()

        full._round = counted
        await add_some(events, 1)
        task = asyncio.create_task(full.run())
        await began.wait()
        await add_some(events, 1, first=1)
        for _ in range(1000):
            await asyncio.sleep(0)
        task.cancel()
        assert rounds < 10

    run(work())


def test_a_store_that_takes_no_changes_is_not_asked_again_and_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may answer each poll all the same, and at each the event is due."""
    monkeypatch.setattr(poller, "BACKOFF_S", 3600.0)
    monkeypatch.setattr(poller, "MIN_GAP_S", 0.0)

    async def work() -> None:
        events, polls, rounds = open_events(world.store()), 0, 0

        async def handle(_: Stored[EventRecord]) -> None:
            raise StoreUnavailable("it can be read alone")

        counting = event_poller(events, "queued", handle, at_once=4)
        begin, poll = counting._round, counting._poll

        async def counted_round() -> float:
            nonlocal rounds
            rounds += 1
            return await begin()

        async def counted_poll(*arguments: Any) -> PollResult:
            nonlocal polls
            polls += 1
            return await poll(*arguments)

        counting._round, counting._poll = counted_round, counted_poll
        await add_some(events, 40)
        task = asyncio.create_task(counting.run())
        while counting.active or counting._backoff_until < 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        before = rounds
        await add_some(events, 1, first=40)
        while rounds == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        assert polls == 1
        monkeypatch.setattr(poller, "BACKOFF_S", 0.0)
        counting._backoff_until = 0.0
        task = asyncio.create_task(counting.run())
        while polls < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()

    run(work())


def test_a_worker_whose_word_is_too_old_claims_nothing(world: World) -> None:
    """Others could take it for lost amid an execution."""

    async def work() -> None:
        events = open_events(world.store())
        [event_id] = await add_some(events, 1)
        stored = events.store.find("acme", event_id)
        assert stored is not None
        with pytest.raises(StoreUnavailable):
            await make_worker(world, events, lambda *_: None)._run(stored)
        assert (await events.get("acme", event_id)).state == "queued"

    run(work())


def test_a_store_that_is_slow_to_list_reaches_all_tenants(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_store, "MAX_POLL_S", 0.0)  # each poll reaches one tenant
    monkeypatch.setattr(worker, "IDLE_S", 0.1)

    async def work() -> None:
        events = open_events(world.store())
        for number in range(3):
            await add_some(events, 1, f"tenant{number}", first=number)
        assert events.store.poll("queued", "", float("inf")).after == "tenant0"
        async with make_worker(world, events, lambda *_: None).running():
            for number in range(3):
                await all_ended(events, [f"inv_{number:04d}"], f"tenant{number}")

    run(work())


def test_dead_letters_are_redriven_up_to_the_queue_s_limit(world: World) -> None:
    async def work() -> None:
        events, now = open_events(world.store(), max_queued=6), world.store().now()
        for number in range(4):
            assert events.store.add(expired(new_event(number, now), now)) is not None
        assert await events.redrive_all("acme", None) == (4, False)

    run(work())


def test_dead_letters_of_a_function_are_found_behind_many_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "MAX_SCANNED_MARKERS", 3)

    async def work() -> None:
        events, now = open_events(world.store()), world.store().now()
        for number in range(9):
            function = "rare" if number < 2 else "frequent"  # the oldest come last
            assert events.store.add(expired(new_event(number, now, function=function), now + number)) is not None
        assert (await events.redrive_all("acme", "rare"))[0] > 0
        assert (await events.list("acme", ("queued",), "rare", "", 10)).events

    run(work())


def test_an_event_that_can_not_be_read_holds_up_no_other_that_is_lost(world: World) -> None:
    store = world.store()
    for number in range(3):
        assert EventStore(store).add(claimed(new_event(number, store.now()), "dead", store.now())) is not None
    store.put("tenants/acme/invocations/inv_0000.json", b"{")
    assert world.recover() == 2


@pytest.mark.parametrize("ends_after", [1, 9])
def test_what_was_lost_waits_neither_for_removals_nor_for_the_next_look(
    world: World, monkeypatch: pytest.MonkeyPatch, ends_after: int
) -> None:
    """While a removal hangs; and workers hear of what was queued again by a tick that ended amid it."""
    store, hangs, told, checks = world.store(), threading.Event(), list[str](), 0
    for number in range(3):
        assert EventStore(store).add(claimed(new_event(number, store.now()), "dead", store.now())) is not None
    world.pass_time(120)
    monkeypatch.setattr(jobs, "remove_old", lambda *_: hangs.wait(60))

    def leads() -> bool:
        nonlocal checks
        checks += 1
        return checks <= ends_after

    async def work() -> None:
        release, retain, _ = event_jobs(EventStore(store), lambda: told.append("queued"))
        removal = asyncio.create_task(retain.run(Tick(float("inf"), lambda: 0.0, lambda: True)))
        await asyncio.sleep(0.05)
        tick = Tick(float("inf"), lambda: 0.0, leads)
        with pytest.raises(TickEnded) if ends_after < 3 else nullcontext():
            await release.run(tick)
        assert (tick.work, told) == (min(ends_after, 3), ["queued"])
        hangs.set()
        await removal

    run(work())


def test_what_runs_at_the_end_is_queued_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STOP_S", 0.1)

    async def work() -> None:
        events = open_events(world.store())
        [event_id] = await add_some(events, 1)
        stopped, began = make_worker(world, events, lambda *_: None), asyncio.Event()

        async def hang(event: EventRecord) -> Any:
            began.set()
            await asyncio.Event().wait()

        stopped._execute = hang
        async with stopped.running():
            await began.wait()
        event = await events.get("acme", event_id)
        assert (event.state, event.attempts[0].error.type) == ("queued", "unavailable")
        async with make_worker(world, events, lambda *_: None).running():
            assert [each.state for each in await all_ended(events, [event_id])] == ["succeeded"]

    run(work())
