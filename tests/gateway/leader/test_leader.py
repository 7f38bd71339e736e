"""The leader: one at a time, jobs with a deadline, nothing done after its lease is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.store import Object
from gateway.leader import leader as leader_module
from gateway.leader.leader import LEASE_SECONDS, TICK_SECONDS, Leader
from gateway.leader.metrics import LeaderMetrics
from gateway.leader.store_leases import STORE_LEASE_SECONDS, StoreLeases
from gateway.leader.tick import Job, Tick, TickEnded


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker:
    """A leader with a clock and metrics of its own."""

    def __init__(self, store: LocalStore, name: str, *jobs: Job) -> None:
        self.clock, self.registry, self.name = Clock(), CollectorRegistry(), name
        metrics = LeaderMetrics(self.registry)
        self.leader = Leader(StoreLeases(store, self.clock), name, jobs, metrics, self.clock)

    def shown(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


def test_one_leads_and_the_next_one_follows_it(tmp_path: Path) -> None:
    async def main() -> None:
        store = LocalStore(tmp_path)
        one, two = Worker(store, "one"), Worker(store, "two")
        await one.leader.beat()
        await two.leader.beat()
        assert (one.leader.leads(), two.leader.leads()) == (True, False)
        assert (one.shown("garnish_leader", worker="one"), two.shown("garnish_leader", worker="two")) == (1, 0)
        two.clock.now += LEASE_SECONDS + 0.1  # the first one is dead
        await two.leader.beat()
        assert two.leader.leads()
        one.clock.now += LEASE_SECONDS  # it was not dead, only stopped
        assert not one.leader.leads(), "before it has asked anybody"
        await one.leader.beat()
        assert not one.leader.leads()
        assert one.shown("garnish_leader", worker="one") == 0
        assert one.shown("garnish_leader_beats_total", outcome="led") == 1
        assert one.shown("garnish_leader_beats_total", outcome="followed") == 1

    asyncio.run(main())


def test_a_job_that_was_stopped_does_nothing_more(tmp_path: Path) -> None:
    """Over the lease's end, and over the tick's deadline."""
    done: list[int] = []
    pauses = {3: LEASE_SECONDS + 0.1}

    async def run(tick: Tick) -> None:
        for step in range(100):
            tick.check()
            done.append(step)
            tick.work += 1
            worker.clock.now += pauses.get(step, 0.0)

    worker = Worker(LocalStore(tmp_path), "one")
    job = Job("steps", run)

    async def main() -> None:
        await worker.leader.run_once(job)
        assert done == [], "it does not lead"
        await worker.leader.beat()
        await worker.leader.run_once(job)
        assert done == [0, 1, 2, 3]
        assert worker.shown("garnish_leader_work_total", job="steps") == 4
        assert worker.shown("garnish_leader_failures_total", job="steps") == 0, "an ended tick is no failure"
        await worker.leader.run_once(job)
        assert done == [0, 1, 2, 3]

    asyncio.run(main())
    tick = Tick(worker.clock.now + TICK_SECONDS, worker.clock, lambda: True)
    tick.check()
    worker.clock.now += TICK_SECONDS
    with pytest.raises(TickEnded):
        tick.check()


def test_a_turn_says_since_when_no_other_has_led(tmp_path: Path) -> None:
    """The first worker is stopped over its lease's end, and the second one leads meanwhile."""
    seen: list[float] = []

    async def run(tick: Tick) -> None:
        seen.append(tick.since)

    store = LocalStore(tmp_path)
    one, two = Worker(store, "one"), Worker(store, "two")

    async def main() -> None:
        one.clock.now = 10.0
        for _ in range(3):
            await one.leader.beat()
            await one.leader.run_once(Job("seen", run))
            one.clock.now += LEASE_SECONDS / 2
        assert seen == [10.0] * 3
        await two.leader.beat()
        two.clock.now += LEASE_SECONDS + 0.1
        await two.leader.beat()
        assert two.leader.leads()
        await two.leader._resign()
        one.clock.now += LEASE_SECONDS
        began = one.clock.now
        await one.leader.beat()
        await one.leader.run_once(Job("seen", run))
        assert seen[3:] == [began]

    asyncio.run(main())


@pytest.mark.parametrize("alone", [False, True])
def test_who_shares_its_nodes_with_nobody_does_their_jobs_without_a_lease(tmp_path: Path, alone: bool) -> None:
    done: list[str] = []

    def job(name: str, **options: Any) -> Job:
        async def run(tick: Tick) -> None:
            tick.check()
            done.append(name)

        return Job(name, run, **options)

    async def main() -> None:
        clock, metrics = Clock(), LeaderMetrics(CollectorRegistry())
        jobs = [job("registry"), job("nodes", scope="nodes")]
        leader = Leader(StoreLeases(LocalStore(tmp_path), clock), "one", jobs, metrics, clock, alone=alone)
        for each in jobs:
            await leader.run_once(each)
        assert done == (["nodes"] if alone else [])
        await leader.beat()
        for each in jobs:
            await leader.run_once(each)
        assert done[-2:] == ["registry", "nodes"]

    asyncio.run(main())


def test_a_job_that_fails_or_hangs_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(leader_module, "OVERTIME_SECONDS", 0.02)
    ticks = 0

    async def good(_: Tick) -> None:
        nonlocal ticks
        ticks += 1

    async def bad(_: Tick) -> None:
        raise ValueError("on purpose")

    async def hung(_: Tick) -> None:
        await asyncio.sleep(3600)

    async def main() -> None:
        registry = CollectorRegistry()
        jobs = [Job("bad", bad, 0.02), Job("hung", hung, 0.02), Job("good", good, 0.02)]
        store = LocalStore(tmp_path)
        leases, metrics = StoreLeases(store, monotonic), LeaderMetrics(registry)
        leader = Leader(leases, "one", jobs, metrics, monotonic, STORE_LEASE_SECONDS)

        def failures(job: str) -> float:
            return registry.get_sample_value("garnish_leader_failures_total", {"job": job}) or 0.0

        async with leader.running():
            while min(ticks, failures("bad"), failures("hung")) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert failures("good") == 0
        other = StoreLeases(store, monotonic)
        assert (await other.take("leader", "two", 1.0)).holder == "two", "given back at its end"

    asyncio.run(asyncio.wait_for(main(), 60))


class Counted(LocalStore):
    calls = 0

    def get(self, key: str) -> Object:
        self.calls += 1
        return super().get(key)


@pytest.mark.parametrize(("seconds", "calls", "patience"), [(0.3, 5, 60.0), (60.0, 2, 1.0)])
def test_the_longer_the_lease_the_fewer_calls_of_the_store(
    tmp_path: Path, seconds: float, calls: int, patience: float
) -> None:
    async def main() -> None:
        store, metrics = Counted(tmp_path), LeaderMetrics(CollectorRegistry())
        leader = Leader(StoreLeases(store, monotonic), "one", [], metrics, monotonic, seconds)
        end = monotonic() + patience
        async with leader.running():
            while store.calls < calls and monotonic() < end:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (store.calls >= calls) == (seconds < 1)

    asyncio.run(main())


class Away(LocalStore):
    away = False

    def get(self, key: str) -> Object:
        if self.away:
            raise StoreUnavailable("away")
        return super().get(key)


def test_without_an_answer_it_leads_until_its_lease_ends(tmp_path: Path) -> None:
    async def main() -> None:
        store = Away(tmp_path)
        worker = Worker(store, "one")
        await worker.leader.beat()
        store.away = True
        worker.clock.now += LEASE_SECONDS - 0.1
        await worker.leader.beat()
        assert worker.leader.leads()
        worker.clock.now += 0.2
        await worker.leader.beat()
        assert not worker.leader.leads()
        assert worker.shown("garnish_leader_beats_total", outcome="failed") == 2
        assert worker.shown("garnish_leader", worker="one") == 0
        store.away = False
        await worker.leader.beat()
        assert worker.leader.leads()

    asyncio.run(main())


class Hung(LocalStore):
    def get(self, key: str) -> Object:
        time.sleep(2)
        return super().get(key)


def test_a_store_that_hangs_holds_up_no_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "LEASE_ANSWER_SECONDS", 0.05)

    async def main() -> None:
        worker = Worker(Hung(tmp_path), "one")
        for _ in range(3):
            await worker.leader.beat()
        assert worker.shown("garnish_leader_beats_total", outcome="failed") == 3

    asyncio.run(asyncio.wait_for(main(), 60))
