"""How many events of a function run at once, against limits that refuse the others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from event_world import RESULT, World, add_some, make_worker, open_events, run

from cluster.errors import ServiceError
from gateway.api.schema import InvokeReply
from gateway.events.records import EventRecord
from gateway.jobs.windows import REFUSAL_FORGOTTEN_S, Windows

F, G = ("acme", "f"), ("acme", "g")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("limit", [1, 2, 8, 31])
def test_a_flood_finds_the_limit_at_once_and_stays_near_it(limit: int) -> None:
    """Rounds in which as many begin as may, and the limit refuses the rest."""
    windows, refused, done = Windows(32, Clock()), 0, 0
    for _ in range(50):
        begun = 0
        while begun < 32 and windows.may_begin(F, begun):
            begun += 1
        for number in range(begun):
            if number < limit:
                windows.record_acceptance(F)
                done += 1
            else:
                windows.record_refusal(F, 0.0, begun)
                refused += 1
    assert done >= 0.8 * 50 * limit
    assert refused < 32 + done / 3
    assert windows.may_begin(G, 0)


def test_a_function_of_which_not_one_is_let_through_waits_for_the_limit() -> None:
    clock = Clock()
    windows = Windows(32, clock)
    for active in range(32):
        assert windows.may_begin(F, active)
    for _ in range(32):
        windows.record_refusal(F, 3.0, 32)
    assert (windows.may_begin(F, 0), windows.closed(), windows.next_opening()) == (False, frozenset({F}), 103.0)
    clock.now += 3.0
    assert (windows.may_begin(F, 0), windows.closed(), windows.next_opening()) == (True, frozenset(), None)
    assert not windows.may_begin(F, 1)
    for pause in (2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        windows.record_refusal(F, 0.0, 1)
        assert windows.next_opening() == clock.now + pause
        clock.now += pause
    clock.now += REFUSAL_FORGOTTEN_S
    assert windows.may_begin(F, 1), "the refusal counts no more"


def test_a_queue_behind_a_limit_is_not_claimed_over_and_over(tmp_path: Path) -> None:
    world, running, refused, done = World(tmp_path / "registry"), 0, 0, asyncio.Event()

    async def execute(event: EventRecord) -> InvokeReply:
        nonlocal running, refused
        if running >= 2:
            refused += 1
            raise ServiceError("rate_limited", "two at once", retry_after=0.2)
        running += 1
        await asyncio.sleep(0.02)
        running -= 1
        world.runs[event.id] += 1
        if len(world.runs) == 30:
            done.set()
        return msgspec.structs.replace(RESULT, id=event.id)

    async def work() -> None:
        events = open_events(world.store())
        await add_some(events, 150)
        worker = make_worker(world, events, lambda *_: None)
        worker._execute = execute
        async with worker.running():
            await done.wait()

    run(work())
    assert refused < 70
