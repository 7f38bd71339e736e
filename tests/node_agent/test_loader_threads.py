"""Loader threads serve jobs in turn; and a long drawn run of loads over a store that fails, by threads as they come."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node_agent.adapter_memory import fetch, ranges
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.loader import use_one_torch_thread
from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import DiskCacheConfig, LinkConfig
from node_agent.leases import LayerState, Lease
from tests.node_agent.adapter_world import Turnstile, World, assert_layer


class Steps:
    """A job of `left` pieces, which it writes down."""

    priority, leased, tenant = Priority.REQUEST, False, ""

    def __init__(self, name: str, left: int, done: list[str], ended: threading.Event, not_before: float = 0.0) -> None:
        self.name, self.left, self.done, self.ended, self.not_before = name, left, done, ended, not_before

    @property
    def load(self) -> Steps:
        return self

    @property
    def over(self) -> bool:
        return self.left == 0

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:
        if is_blocked or not self.left or now < self.not_before:
            return None
        self.left -= 1
        return self._work

    def wake_at(self) -> float | None:
        return self.not_before if self.left else None

    def _work(self) -> None:
        self.done.append(self.name)
        if not self.left:
            self.ended.set()


def test_a_loader_keeps_one_torch_thread_whatever_the_engine_sets() -> None:
    """The engine changes its own number of threads, for CPU workers, between a loader's start and its first copy."""
    threads, seen = LoaderThreads("test", 1, use_one_torch_thread), list[int]()
    before = torch.get_num_threads()
    try:
        for work in (lambda: None, lambda: seen.append(torch.get_num_threads())):
            ended = threading.Event()
            job = Steps("job", 1, [], ended)
            job._work = lambda work=work, ended=ended: (work(), ended.set())  # type: ignore[assignment, method-assign]
            threads.add(job)
            assert ended.wait(30)
            torch.set_num_threads(2)
        assert seen == [1]
    finally:
        torch.set_num_threads(before)
        threads.close(wait=True)


def test_tenants_take_turns_however_many_jobs_each_has() -> None:
    """One thread, held by a first piece until all jobs are there: 250 loads of one tenant and then one of another."""
    threads, done, held = LoaderThreads("test", 1), list[str](), threading.Event()
    ends = [threading.Event() for _ in range(252)]
    first = Steps("first", 1, done, ends[0])
    first._work = lambda: held.wait(30)  # type: ignore[assignment, method-assign, return-value]
    threads.add(first)
    for number, end in enumerate(ends[1:-1]):
        job = Steps(f"a{number}", 2, done, end)
        job.tenant = "a"
        threads.add(job)
    single = Steps("b", 4, done, ends[-1])
    single.tenant = "b"
    threads.add(single)
    held.set()
    try:
        assert all(end.wait(30) for end in ends[1:])
    finally:
        threads.close(wait=True)
    assert [name[0] for name in done[:8]] == ["a", "b"] * 4
    assert done[::2][:4] == ["a0", "a1", "a2", "a3"]
    assert len(done) == 504


def test_jobs_are_served_in_turn() -> None:
    """One thread, held by a first piece until all jobs are there: then one piece of each, over and over."""
    threads, done, held = LoaderThreads("test", 1), [], threading.Event()
    ends = [threading.Event() for _ in range(4)]
    first = Steps("first", 1, done, ends[0])
    first._work = lambda: held.wait(30)  # type: ignore[assignment, method-assign, return-value]
    threads.add(first)
    for name, left, end in zip("abc", (3, 1, 2), ends[1:], strict=True):
        threads.add(Steps(name, left, done, end))
    held.set()
    assert all(end.wait(30) for end in ends[1:])
    assert "".join(done) == "abcaca"
    threads.close(wait=True)


def test_what_the_batch_waits_for_goes_first() -> None:
    """In turn among themselves, and then the others; a job may become one of them at any time."""
    threads, done, held = LoaderThreads("test", 1), list[str](), threading.Event()
    ends = [threading.Event() for _ in range(5)]
    jobs = [Steps(name, left, done, end) for name, left, end in zip("abcd", (2, 3, 2, 1), ends[1:], strict=True)]
    first = Steps("first", 1, done, ends[0])
    first._work = lambda: held.wait(30)  # type: ignore[assignment, method-assign, return-value]
    for job in (first, *jobs):
        threads.add(job)
    jobs[1].leased = jobs[3].leased = True
    held.set()
    assert all(end.wait(30) for end in ends[1:])
    assert "".join(done) == "bdbbacac"
    threads.close(wait=True)


def test_a_job_that_is_due_later_needs_no_wake() -> None:
    threads, done, end = LoaderThreads("test", 2), [], threading.Event()
    due = time.monotonic() + 0.02
    threads.add(Steps("late", 1, done, end, not_before=due))
    assert end.wait(30) and time.monotonic() >= due
    threads.close(wait=True)


def test_many_jobs_use_many_threads_and_no_more() -> None:
    threads, together = LoaderThreads("test", 3), threading.Barrier(3)

    def meet() -> None:
        together.wait(30)

    ends = [threading.Event() for _ in range(6)]
    jobs = [Steps("x", 1, [], end) for end in ends]
    for job in jobs:
        own = job._work
        job._work = lambda own=own: (meet(), own())  # type: ignore[assignment, method-assign, misc]
        threads.add(job)
    assert all(end.wait(30) for end in ends)
    assert len(threads._threads) == 3
    threads.close(wait=True)


class Flaky:
    """Spoils a third of the reads, as drawn."""

    def __init__(self, seed: int) -> None:
        self._rng, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, start: int, buffer: memoryview) -> int | None:
        with self._lock:
            kind = self._rng.choice(["fine"] * 6 + ["flip", "short", "lost"])
        if kind == "flip":
            buffer[len(buffer) // 2] ^= 16
        if kind == "lost":
            raise OSError("connection reset")
        return len(buffer) // 3 if kind == "short" else None


class Caller:
    """Draws what engine and CPU workers may do, and checks everything after each step."""

    def __init__(self, store: AdapterStore, world: World, seed: int) -> None:
        self.store, self.world, self.rng = store, world, random.Random(seed)
        self.held: list[Lease] = []
        self.waiting: list[str] = []
        self.holds: list[HostAdapter] = []

    def step(self) -> None:
        adapter, store = self.rng.choice(self.world.adapters), self.store
        action = self.rng.choice(["announce", "retract", "acquire", "acquire", "release", "hold", "let go", "wait"])
        if action == "announce":
            store.announce(adapter)
            self.waiting.append(adapter.digest)
        elif action == "retract" and self.waiting:
            store.retract(self._draw(self.waiting))
        elif action == "acquire" and len(self.held) < 4:
            found = store.acquire(adapter, self.rng.sample(range(5), 5))
            self.held += [found] if isinstance(found, Lease) else []
        elif action == "release" and self.held:
            store.release(self._draw(self.held), [])
        elif action == "hold" and self.held:
            hold = store.hold_host(self.rng.choice(self.held))
            self.holds += [hold] if hold is not None else []
        elif action == "let go" and self.holds:
            store.release_host(self._draw(self.holds))
        elif action == "wait":
            time.sleep(0.001)
        store.poll()
        self.check()

    def check(self) -> None:
        store = self.store
        assert check_memory(store) == []
        for held in self.held:
            for layer in range(5):
                if store.state(held, layer) == LayerState.DEVICE:
                    store.layer_weights(held, layer)
                    assert_layer(self.world, held.digest, store.table, store.pool.data, held.slot, layer)
        for hold in self.holds:
            for layer in (at for at, here in enumerate(hold.here) if here):
                pool = store.hosts.pool
                assert_layer(self.world, hold.digest, store.hosts.table, pool.data, hold.slot, layer)

    def leave(self) -> None:
        for digest in self.waiting:
            self.store.retract(digest)
        for held in self.held:
            self.store.release(held, [])
        for hold in self.holds:
            self.store.release_host(hold)

    def _draw(self, things: list) -> object:  # type: ignore[type-arg]
        return things.pop(self.rng.randrange(len(things)))


@pytest.mark.parametrize("seed", range(4))
def test_drawn_faults_and_changes_of_mind(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever fails and whoever leaves: no layer is wrong, no page has two owners, and everything comes back."""
    monkeypatch.setattr(fetch, "BACK_OFF", 0.001)
    if seed % 2:
        monkeypatch.setattr(ranges, "FIRST_RANGE", 1)
        monkeypatch.setattr(ranges, "LARGEST_RANGE", 1)
    turnstile = Turnstile(world.objects)
    turnstile.open_all()
    turnstile.spoil = Flaky(seed)
    if seed >= 2:
        turnstile.spoil_first = lambda data: data
    cache = DiskCacheConfig(str(tmp_path / "cache"), 1 << 20)
    links = {"load_link": LinkConfig(5e7), "store_link": LinkConfig(5e7, 1e-4)}
    store = world.store(turnstile, host_memory=2 << 20, disk_cache=cache, **links)  # type: ignore[arg-type]
    store.hosts.failure_memory = 0.0
    caller = Caller(store, world, seed)
    for _ in range(120):
        caller.step()
    caller.leave()
    hosts, deadline = store.hosts, time.monotonic() + 60
    while store.leases or any(not e.settled for e in store.device.values()) or hosts._fetching or hosts._measuring:
        store.poll()
        time.sleep(0.0005)
        assert time.monotonic() < deadline
    for digest in list(store.device):
        assert store.discard(digest)
    for host in list(hosts._all.values()):
        hosts.forget(host)
    store.poll()
    assert (hosts.used, store.pool.free_bytes) == (0, store.pool.size)
    assert not hosts.table.rank.any() and not store.table.rank.any()
    assert len(hosts._free_slots) == hosts.table.shape.slots
    assert store.cache is not None and store.cache._writing == 0
    store.close()
