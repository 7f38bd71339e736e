"""Workers that are killed, stopped or left alone: handoffs fail in time, late writes hurt nobody, answers are exact."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from node_agent.coldstart.assist import Assist
from node_agent.coldstart.workers import WorkerPool
from tests.node_agent.coldstart.pools import (
    CORES,
    LONG,
    counted,
    draw_x,
    drawn_case,
    eventually,
    hand_over,
    is_right,
    poison,
    started,
    state,
)
from tests.support.host_case import HostCase
from tests.support.worker_counters import counters_of

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="NOT RUN: two workers need two cores")


@pytest.fixture(scope="module")
def case() -> Iterator[HostCase]:
    made = drawn_case(torch.float32, seed=5)
    yield made
    made.close()


@pytest.fixture(scope="module")
def kept(case: HostCase, soon_again: None) -> Iterator[WorkerPool]:
    """To start workers takes longer than most tests. They sleep between two of these."""
    with started(case, 2) as pool:
        pool.disarm()
        yield pool


@pytest.fixture
def pool(kept: WorkerPool) -> Iterator[WorkerPool]:
    """Two armed workers, for tests that leave two, no slot in quarantine, and the pool armed."""
    assert kept.wait_ready(LONG) == 2 and not counters_of(kept).in_quarantine
    kept.arm()
    yield kept
    kept.disarm()


def check_exact(pool: WorkerPool, case: HostCase, rounds: int = 5) -> None:
    for seed in range(rounds):
        x = draw_x(40, 40, torch.float32, seed)
        handoff = hand_over(pool, x, seed % 3, 0, "gate_up", 20)
        assert handoff is not None and handoff.wait(LONG)
        assert is_right(handoff, case, x, seed % 3, 0, "gate_up")
        handoff.close()


def all_back(pool: WorkerPool) -> bool:
    """Whether both workers are there again. Until then the one that lives sleeps: it would poll all the time."""
    pool.disarm()
    try:
        return pool.wait_ready(LONG) == 2
    finally:
        pool.arm()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: state(pid) == "T")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_killed_during_a_layer(case: HostCase, pool: WorkerPool) -> None:
    """Noticed long before the wait's limit; another takes over; the next process does not touch the old command."""
    (first, second), before = pool.pids(), counters_of(pool)
    poison(pool)
    x = draw_x(40, 40, torch.float32)
    with stopped(first):
        handoff = hand_over(pool, x, 0, 0, "qkv", 20)
        assert handoff is not None
        slot, value = handoff._slot, handoff._parts[0].value
        os.kill(first, signal.SIGKILL)
        assert handoff.wait(LONG) and is_right(handoff, case, x, 0, 0, "qkv")
    handoff.close()
    check_exact(pool, case)  # by whoever lives
    assert all_back(pool) and first not in pool.pids() and second in pool.pids()
    check_exact(pool, case, rounds=20)
    flags = pool._flags
    assert not flags.wait(pool.memory.done_flags[slot][0], value, 0)
    counters = counted(pool, before)
    assert (counters.deaths, counters.restarts, counters.timeouts, counters.in_quarantine) == (1, 1, 0, 0)
    assert counters.takeovers == 1


def test_stopped_during_a_layer(case: HostCase, pool: WorkerPool) -> None:
    """It times out and its slot is nobody's until it has answered: the late write goes there, and only there."""
    (first, second), before = pool.pids(), counters_of(pool)
    poison(pool)
    x = draw_x(40, 40, torch.float32)
    with stopped(first):
        handoff = hand_over(pool, x, 0, 0, "qkv", 20)
        assert handoff is not None
        outputs = handoff._outputs
        assert not handoff.wait(0.01)
        assert outputs[0][:20].isnan().all()
        handoff.close()
        assert counters_of(pool).in_quarantine == 1 and counted(pool, before).timeouts == 1
        others = [hand_over(pool, x, 0, 0, "qkv", 20) for _ in range(pool.layout.slots)]
        assert others[-1] is None, "all slots but one are there"
        for other in others[:-1]:
            assert other is not None and other.wait(LONG) and is_right(other, case, x, 0, 0, "qkv")
            other.close()
        check_exact(pool, case, rounds=20)  # in the other slots, by the other worker
        assert outputs[0][:20].isnan().all()
        assert pool.pids() == [first, second]
    eventually(lambda: counters_of(pool).in_quarantine == 0)
    for y, want in zip(outputs, case.expected(x, 0, 0, "qkv"), strict=True):
        assert torch.allclose(y.double(), want, atol=1e-4)
    check_exact(pool, case, rounds=20)
    counters = counted(pool, before)
    assert (counters.deaths, counters.quarantined, counters.timeouts) == (0, 1, 1)


def stall_for_good(pool: WorkerPool) -> None:
    """Stops the first worker until it is killed."""
    with stopped(pool.pids()[0]):
        handoff = hand_over(pool, draw_x(40, 40, torch.float32), 0, 0, "qkv", 20)
        assert handoff is not None and not handoff.wait(0.01)
        handoff.close()
        eventually(lambda: counters_of(pool).deaths == counters_of(pool).restarts == 1)


def held() -> tuple[int, int]:
    """This process's descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_worker_that_stays_stopped_is_replaced_and_close_leaves_nothing(case: HostCase) -> None:
    before = held()
    with started(case, 1, slots=2, stall_limit=0.05) as pool:
        pids = pool.pids()
        stall_for_good(pool)
        assert pool.wait_ready(LONG) == 1 and pids[0] not in pool.pids()
        assert counters_of(pool).in_quarantine == 0
        check_exact(pool, case)
        pids += pool.pids()
        open_one = hand_over(pool, draw_x(40, 40, torch.float32), 0, 0, "qkv", 20)
    assert [state(pid) for pid in pids] == ["", ""]
    assert open_one is not None
    open_one.wait(LONG)
    open_one.close()
    del pool, open_one
    # one more: the map's own copy of the memfd, freed with its views
    assert held()[1] == before[1] and held()[0] <= before[0] + 1


def test_a_worker_that_can_not_be_started_again_for_a_while(
    case: HostCase, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the host has no memory or process left: the other works on, and the place is filled when it can be."""
    (first, second), before = pool.pids(), counters_of(pool)
    tries = 0

    def refuse(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: tries > 1)
        assert pool.pids() == [second]
        check_exact(pool, case)
    assert all_back(pool)
    check_exact(pool, case)
    counters = counted(pool, before)
    assert (counters.deaths, counters.restarts) == (1, 1)


class HeldRows:
    """A store's host tier: who holds rows there."""

    def __init__(self) -> None:
        self.held: list[object] = []

    def hold_host(self, lease: object) -> object:
        self.held.append(lease)
        return lease

    def release_host(self, hold: object) -> None:
        self.held.remove(hold)


@pytest.mark.skipif(len(CORES) < 2, reason="two workers need a core each")
def test_a_quarantined_slot_keeps_its_own_rows_alone(case: HostCase, pool: WorkerPool) -> None:
    rows = HeldRows()
    assist = Assist(rows, SimpleNamespace(widths=case.widths), None, pool)  # type: ignore[arg-type]
    x = draw_x(4, 40, case.host.torch_dtype)
    late, fine = (assist.begin(name, None) for name in ("late", "fine"))  # type: ignore[arg-type]
    assert late is not None and fine is not None and rows.held == ["late", "fine"]
    with stopped(pool.pids()[0]):
        handoff = hand_over(late._messages.handoffs, x, 2, 0, "qkv", 4)
        assert not handoff.wait(0.05)
        handoff.close()
        late.end()
        assert counters_of(pool).in_quarantine == 1
        handoff = hand_over(fine._messages.handoffs, x, 2, 0, "qkv", 4)
        assert handoff.wait(LONG)
        handoff.close()
        fine.end()
        assert rows.held == ["late"]
    eventually(lambda: not counters_of(pool).in_quarantine)
    assist.poll()
    assert not rows.held


def test_all_slots_in_quarantine(case: HostCase) -> None:
    """No worker, no slot: `open` says so at once instead of waiting. Nor does anybody take over."""
    with started(case, 1, slots=2) as pool, contextlib.ExitStack() as stack:
        stack.enter_context(stopped(pool.pids()[0]))
        x = draw_x(4, 40, torch.float32)
        first, second = hand_over(pool, x, 0, 0, "qkv", 4), hand_over(pool, x, 0, 0, "qkv", 4)
        assert first is not None and second is not None and hand_over(pool, x, 0, 0, "qkv", 4) is None
        first.close()
        assert hand_over(pool, x, 0, 0, "qkv", 4) is None
        second.close()
        stack.close()
        eventually(lambda: counters_of(pool).in_quarantine == 0)
        check_exact(pool, case)
        with stopped(pool.pids()[0]):
            handoff = hand_over(pool, x, 0, 0, "qkv", 4)
            os.kill(pool.pids()[0], signal.SIGKILL)
            assert not handoff.wait(LONG)
        with pytest.raises(RuntimeError, match="between a successful `wait`"):
            _ = handoff.outputs
        handoff.close()
        assert counters_of(pool).takeovers == 0


def test_a_spare_worker_takes_over(case: HostCase) -> None:
    """The slice of one that stalls, whose late answer hurts nobody, and of one that dies; and its place meanwhile."""
    with started(case, 1, spares=1) as pool:
        first, spare = pool.pids()
        assert os.sched_getaffinity(spare) == set(CORES[:1])
        check_exact(pool, case)
        assert pool.usable == 1 and pool._polling == {0}, "it sleeps"
        x, takeover_ns = draw_x(40, 40, torch.float32), pool.takeover_ns
        with stopped(first):
            poison(pool)
            pool.takeover_ns = 1_000_000
            handoff = hand_over(pool, x, 0, 0, "qkv", 20)
            late = handoff._outputs
            assert handoff.wait(LONG) and is_right(handoff, case, x, 0, 0, "qkv")
            assert all(y.isnan().all() for y in late)
            handoff.close()
            pool.takeover_ns = takeover_ns
            assert pool.usable == 1 and counters_of(pool).in_quarantine == 1
            check_exact(pool, case)  # by the spare one
        eventually(lambda: counters_of(pool).in_quarantine == 0)
        assert pool.available[0].process.pid == first
        with stopped(first):
            handoff = hand_over(pool, x, 1, 0, "gate_up", 20)
            os.kill(first, signal.SIGKILL)
            assert handoff.wait(LONG) and is_right(handoff, case, x, 1, 0, "gate_up")
            handoff.close()
        assert [worker.process.pid for worker in pool.available] == [spare]
        check_exact(pool, case)
        eventually(lambda: first not in pool.pids())
        assert pool.wait_ready(LONG, 2) == 2 and pool.available[0].process.pid not in (first, spare)
        check_exact(pool, case)
        counters = counters_of(pool)
        assert (counters.deaths, counters.timeouts, counters.takeovers) == (1, 0, 2)


@pytest.mark.parametrize(("seed", "deaths"), [(0, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_killed_at_any_point(case: HostCase, pool: WorkerPool, seed: int, deaths: int) -> None:
    """Every handoff is right or fails; never a wrong number, never a wait without an end."""
    draw, done, before = random.Random(seed), threading.Event(), counters_of(pool)

    def kill() -> None:
        # With no end of it a slow host, where workers take seconds to come back, would hardly get an answer.
        killed = set[int]()
        while len(killed) < deaths and not done.wait(draw.random() * 0.05):
            pids = pool.pids()
            if len(pids) == 2 and killed.isdisjoint(pids):
                pid = draw.choice(pids)
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    right = failed = 0
    try:
        while (ended := counted(pool, before).deaths) < min(deaths, 3) or right < 200:
            if not pool.usable or (len(pool.pids()) < 2 and right >= 100 * (1 + ended)):
                all_back(pool)
            poison_x = draw_x(draw.randint(1, 96), 40, torch.float32, draw.randint(0, 99))
            handoff = hand_over(pool, poison_x, 2, 0, "qkv", draw.randint(1, 96))
            if handoff is None:
                continue
            if handoff.wait(LONG):
                assert is_right(handoff, case, poison_x, 2, 0, "qkv")
                right += 1
            else:
                failed += 1
            handoff.close()
    finally:
        done.set()
        killer.join()
    assert all_back(pool)
    eventually(lambda: counters_of(pool).in_quarantine == 0)
    check_exact(pool, case)
    counters = counted(pool, before)
    assert counters.restarts == counters.deaths and counters.timeouts == 0
    assert counters.handoffs == right + failed + counters.takeovers + 5


def test_only_armed_workers_poll(case: HostCase, pool: WorkerPool) -> None:
    """Each alone on its core, and without CUDA."""
    pids = pool.pids()
    assert [os.sched_getaffinity(pid) for pid in pids] == [{core} for core in CORES[:2]]
    for worker in pool._keeper.workers:
        assert worker.ready is not None and worker.ready.compiled and not worker.ready.cuda
    pool.arm()
    pool.disarm()  # one of two
    check_exact(pool, case)
    x = draw_x(40, 40, torch.float32)
    handoff = hand_over(pool, x, 0, 0, "qkv", 20)
    pool.disarm()  # what was posted before is still answered
    assert handoff is not None and handoff.wait(LONG) and is_right(handoff, case, x, 0, 0, "qkv")
    handoff.close()
    eventually(lambda: [state(pid) for pid in pids] == ["S", "S"])
    assert all(_waits_in_a_read(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="between arm"):
        hand_over(pool, x, 0, 0, "qkv", 20)
    for _ in range(50):
        pool.arm()
        check_exact(pool, case, rounds=1)
        pool.disarm()
    pool.arm()


def _waits_in_a_read(pid: int) -> bool:
    """Its system call is read(2), number 0 on x86-64, of its eventfd."""
    call = Path(f"/proc/{pid}/syscall").read_text().split()
    return call[0] == "0" and "eventfd" in os.readlink(f"/proc/{pid}/fd/{int(call[1], 16)}")
