"""One event from its call to its end and removal: retries, deadlines, metrics, and what newer releases store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from event_world import World, add_some, all_ended, default_account, make_worker, new_event, open_events, run
from prometheus_client import CollectorRegistry

from adapters.errors import NotFound
from cluster.errors import ServiceError
from gateway.catalog.threads import StoreThreads
from gateway.events import transitions
from gateway.events.event_store import EventStore
from gateway.events.events import Events, make_channel
from gateway.events.jobs import COUNTED_INDEXES, DEAD_KEPT_S, KEPT_S, count_events, release_lost, remove_old
from gateway.events.metrics import EventMetrics
from gateway.events.records import ENDED, marker_key, markers_of, parse_marker
from gateway.events.transitions import claimed, expired, failed
from gateway.jobs import poller
from gateway.leader.tick import Tick


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "registry")


def test_retries_are_bounded_and_postponements_are_no_attempts(world: World) -> None:
    now = world.store().now()
    event = new_event(1, now)
    for _ in range(3):
        assert event.state == "queued"
        event = failed(claimed(event, "w", now), ServiceError("rate_limited", "slow"), now)
        assert (event.attempts, event.due > now) == ((), True)
    for number in range(3):
        assert event.state == "queued"
        event = failed(claimed(event, "w", now), ServiceError("overloaded", "full", retry_after=40.0), now)
        assert len(event.attempts) == number + 1
        assert event.state == "failed" or event.due >= now + 40.0
    assert event.state == "failed"
    refused = failed(claimed(new_event(2, now), "w", now), ServiceError("not_found", "gone"), now)
    assert refused.state == "failed"


def test_old_events_are_removed(world: World) -> None:
    async def work() -> None:
        events = open_events(world.store())
        ids = await add_some(events, 3)
        async with make_worker(world, events, lambda *_: None).running():
            await all_ended(events, ids)
        dead = new_event(7, world.store().now(), deadline=0.0)
        store = EventStore(world.store())
        assert store.add(expired(dead, world.store().now())) is not None
        tick = Tick(float("inf"), lambda: 0.0, lambda: True)
        world.pass_time(KEPT_S - 60)
        remove_old(store, tick)
        assert tick.work == 0
        world.pass_time(120)
        remove_old(store, tick)
        assert tick.work == 3
        for event_id in ids:
            with pytest.raises(NotFound):
                await events.get("acme", event_id)
        assert (await events.get("acme", dead.id)).state == "expired"
        world.pass_time(DEAD_KEPT_S)
        remove_old(store, tick)
        assert not list(world.store().list("events/"))
        assert not list(world.store().list("tenants/"))

    run(work())


def test_metrics_tell_what_became_of_events(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that another process has lost, cancelled or queued again."""
    monkeypatch.setattr(transitions, "FIRST_PAUSE_S", 0.05)
    registry = CollectorRegistry()
    store = EventStore(world.store(), EventMetrics(registry))

    def told(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"garnish_{name}", labels) or 0.0

    def error(event_id: str, number: int) -> ServiceError | None:
        kinds = {"inv_0001": "validation_failed", "inv_0002": "node_failed" if number == 1 else ""}
        return ServiceError(kind, "no") if (kind := kinds.get(event_id)) else None

    async def work() -> None:
        events = Events(store, StoreThreads(10.0, 4), make_channel(None), account_of=default_account)
        ids = await add_some(events, 3)
        async with make_worker(world, events, error).running():
            await all_ended(events, ids)
            await events.redrive("acme", ids[1])
            await all_ended(events, ids)
        [waits] = await add_some(events, 1, first=3)
        await add_some(events, 2, "other", first=4)
        await events.cancel("acme", waits)
        count_events(store, Tick(float("inf"), lambda: 0.0, lambda: True))

    run(work())
    assert (told("events_accepted_total"), told("events_redriven_total")) == (6, 1)
    attempts = {name: told("event_attempts_total", outcome=name) for name in ("succeeded", "retried", "failed")}
    assert attempts == {"succeeded": 2, "retried": 1, "failed": 2}
    ended = {state: told("events_ended_total", state=state) for state in ENDED}
    assert ended == {"succeeded": 2, "failed": 2, "cancelled": 1, "expired": 0}
    there = {index: told("events", index=index) for index in COUNTED_INDEXES}
    assert there == {"queued": 2, "running": 0, "failed": 1, "expired": 0, "delivering": 0}
    lost = store.add(claimed(new_event(9, world.store().now(), retries=0), "dead", world.store().now()))
    assert lost is not None
    world.pass_time(120)
    release_lost(store, Tick(float("inf"), lambda: 0.0, lambda: True))
    assert told("events_ended_total", state="failed") == 3


def test_no_attempt_is_used_up_by_a_node_that_goes_between_claim_and_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(poller, "BACKOFF_S", 0.05)
    serves, tries = True, 0

    async def can_run() -> bool:
        return serves

    def failing(*_: Any) -> ServiceError | None:
        nonlocal serves, tries
        tries += 1
        serves = tries > 3
        return None if serves else ServiceError("unavailable", "no node is ready")

    async def work() -> None:
        nonlocal serves
        events = open_events(world.store())
        [event_id] = await add_some(events, 1)
        worker = make_worker(world, events, failing)
        worker._can_run = can_run
        async with worker.running():
            for number in range(1, 4):
                while tries < number or (await events.get("acme", event_id)).state != "queued":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert (await events.get("acme", event_id)).attempts == ()
                serves = True
            [event] = await all_ended(events, [event_id])
        assert (event.state, len(event.attempts)) == ("succeeded", 1)

    run(work())


def test_an_event_past_its_deadline_is_not_run(world: World) -> None:
    async def work() -> None:
        events = open_events(world.store())
        now = await events.clock.now()
        await events.add(new_event(1, now, deadline=now - 1.0))
        async with make_worker(world, events, lambda *_: None).running():
            [event] = await all_ended(events, ["inv_0001"])
        assert (event.state, event.error.type) == ("expired", "timeout")
        assert not world.runs

    run(work())


def test_a_newer_release_stores_more(world: World) -> None:
    """Fields that this release does not know are passed over."""
    store = world.store()
    event = new_event(1, store.now())
    EventStore(store).add(event)
    key = f"tenants/acme/invocations/{event.id}.json"
    stored = store.get(key)
    more = msgspec.json.encode({**msgspec.json.decode(stored.data), "newer": {"x": 1}})
    store.put_if_match(key, more, stored.etag)
    found = EventStore(store).find("acme", event.id)
    assert found is not None
    assert found.record == event


@pytest.mark.parametrize("function", ["pirate", "a-b.c_d", "org/base", ""])
def test_markers_say_what_they_are(world: World, function: str) -> None:
    event = msgspec.structs.replace(new_event(1, 1700000000.123), function=function, tenant="a.b-c")
    running = claimed(event, "abc", 1700000001.5)
    for each in (event, running, expired(running, 1700000002.75)):
        [key] = markers_of(each)
        marker = parse_marker(key)
        assert marker is not None
        assert marker_key(each.state, each, marker.time, each.nonce) == marker.key == key
        assert key.startswith(f"events/{each.state}/a.b-c/")
        assert (marker.tenant, marker.id, marker.holder) == ("a.b-c", each.id, each.holder)
        assert marker.function == ("" if "/" in function else function)
