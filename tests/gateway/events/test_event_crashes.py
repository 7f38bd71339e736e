"""Gateways that die at drawn writes: no acknowledged event is lost, none ends twice, none runs too often."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from event_world import World, all_ended, leftovers, make_worker, new_event, open_events
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.errors import StoreUnavailable
from cluster.errors import ServiceError
from gateway.events import transitions
from gateway.events.records import event_key
from gateway.jobs import poller
from tests.support.draws import draws

EVENTS = 12
WAIT_S = 60.0
WRITES = 10
"""About so many an event takes."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is soon tried again."""
    monkeypatch.setattr(transitions, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(poller, "MIN_GAP_S", 0.01)


@settings(max_examples=draws(8), deadline=None)
@given(
    deaths=st.lists(st.tuples(st.integers(1, EVENTS * WRITES), st.booleans()), min_size=1, max_size=3),
    submitting=st.integers(1, EVENTS * 4),
    lost_node=st.sets(st.integers(0, EVENTS - 1), max_size=3),
)
def test_killed_at_any_write(deaths: list[tuple[int, bool]], submitting: int, lost_node: set[int]) -> None:
    """`submitting`: at which write the gateway dies that takes the events; `lost_node`: whose every execution fails."""
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "registry")
        acknowledged = asyncio.run(submit(world, submitting))
        for dies_at, after in deaths:
            asyncio.run(live_and_die(world, acknowledged, lost_node, dies_at, after))
            world.recover()
        asyncio.run(live(world, acknowledged, lost_node))
        check(world, acknowledged, lost_node)


def fails(lost_node: set[int], event_id: str) -> ServiceError | None:
    return ServiceError("node_failed", "lost", retry_after=0.0) if int(event_id[4:]) in lost_node else None


async def submit(world: World, dies_at: int) -> list[str]:
    """Returns the events of which the gateway said that it has them before it died."""
    events, acknowledged = open_events(world.store(dies_at, after=dies_at % 2 == 0)), []
    for number in range(EVENTS):
        try:
            await events.add(new_event(number, await events.clock.now()))
        except StoreUnavailable:
            break
        acknowledged.append(f"inv_{number:04d}")
    return acknowledged


async def live_and_die(world: World, acknowledged: list[str], lost_node: set[int], dies_at: int, after: bool) -> None:
    """Returns when the gateway is dead, or all is done before; its tasks end with the event loop."""
    store = world.store(dies_at, after)
    events = open_events(store)
    worker = make_worker(world, events, lambda event_id, _: fails(lost_node, event_id))

    async def run() -> None:
        async with worker.running():
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    done = asyncio.create_task(all_ended(open_events(world.store()), acknowledged))
    dead = asyncio.create_task(asyncio.to_thread(store.dead.wait, 3.0))
    await asyncio.wait([done, dead, running], return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    store.dead.set()


async def live(world: World, acknowledged: list[str], lost_node: set[int]) -> None:
    events = open_events(world.store())
    async with asyncio.timeout(WAIT_S), make_worker(world, events, lambda e, _: fails(lost_node, e)).running():
        while True:
            world.pass_time(10)  # pauses of retries
            events.clock = open_events(world.store()).clock
            events.wake()
            try:
                async with asyncio.timeout(0.5):
                    await all_ended(events, acknowledged)
                    return
            except TimeoutError:
                continue


def check(world: World, acknowledged: list[str], lost_node: set[int]) -> None:
    store = open_events(world.store()).store
    for event_id in acknowledged:
        stored = store.find("acme", event_id)
        assert stored is not None
        event = stored.record
        assert world.ends[event_key("acme", event_id)] == 1
        assert world.runs[event_id] <= len(event.attempts) <= event.retries + 1
        if int(event_id[4:]) in lost_node:
            assert (event.state, event.result) == ("failed", None)
            assert event.error is not None
        elif event.state == "succeeded":
            assert event.result is not None
            assert event.result.id == event_id
        else:  # its workers died, each time
            assert [attempt.error is not None for attempt in event.attempts] == [True] * (event.retries + 1)
    world.recover()
    assert not [key for key in leftovers(store.objects) if key.startswith("events/running/")]
