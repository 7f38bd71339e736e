"""Handoffs enqueued on a device's stream, with real workers: a CPU does what the kernels do, events are held."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.handoff_device import Signal
from node_agent.coldstart import stream
from node_agent.coldstart.handoffs import Part
from node_agent.coldstart.measure import measure_handoff
from node_agent.coldstart.shared import DTYPES, Layout
from node_agent.coldstart.slices import MIN_SHARE, Segment
from node_agent.coldstart.stream import BrokenHandoff, StreamPass, StreamPool
from tests.node_agent.coldstart.held_event import HeldEvent
from tests.node_agent.coldstart.pools import (
    CORES,
    LONG,
    MAX_TOKENS,
    counted,
    draw_x,
    drawn_case,
    eventually,
    hand_over,
    is_right,
    poison,
)
from tests.support.crowded import CrowdedPool
from tests.support.host_case import HostCase
from tests.support.host_kernels import HostKernels
from tests.support.worker_counters import counters_of

CPU = torch.device("cpu")


@pytest.fixture
def held(pool: StreamPool, monkeypatch: pytest.MonkeyPatch) -> list[HeldEvent]:
    """Every event that the pool records, in order."""
    events: list[HeldEvent] = []

    def record(_: torch.device) -> HeldEvent:
        events.append(HeldEvent())
        return events[-1]

    monkeypatch.setattr(stream, "record_event", record)
    return events


FP32, BF16 = pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")
by_dtype = pytest.mark.parametrize("case", [FP32, BF16], indirect=True)
by_one_dtype = pytest.mark.parametrize(
    "case", [FP32, pytest.param(*BF16.values, id="bf16", marks=pytest.mark.slow)], indirect=True
)
"""For what does not depend on numbers."""
SLOTS, STEPS = 2, 3


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> Iterator[HostCase]:
    found = drawn_case(request.param)
    yield found
    found.close()


@pytest.fixture(scope="module")
def kept(case: HostCase, soon_again: None) -> Iterator[StreamPool]:
    """With a worker that sleeps between two tests: to start one takes longer than most of them."""
    layout = Layout(SLOTS, 1, MAX_TOKENS, case.widths, DTYPES.index(case.host.torch_dtype), STEPS)
    pool = StreamPool(case.host, layout, CORES[:1], CPU, HostKernels(), LONG, LONG)
    try:
        pool.start()
        assert pool.wait_ready(LONG) == 1
        yield pool
    finally:
        pool.close()


@pytest.fixture
def pool(kept: StreamPool) -> Iterator[StreamPool]:
    """An armed worker and SLOTS free slots, for tests that leave these."""
    assert kept.wait_ready(LONG) == 1 and not counters_of(kept).in_quarantine
    kept.arm()
    yield kept
    kept.disarm()
    assert kept._armed == 0
    passes = [begun(kept) for _ in range(SLOTS)]
    for one in passes:
        one.end()


def begun(pool: StreamPool) -> StreamPass:
    one = pool.begin_pass()
    assert one is not None
    return one


def handed_over(pool: StreamPool, one: StreamPass, case: HostCase, tokens: int, group: str, layer: int) -> bool:
    width = dict(zip(("qkv", "o", "gate_up", "down"), pool.memory.group_widths, strict=True))[group][0]
    x = draw_x(tokens, width, case.host.torch_dtype, tokens)
    handoff = hand_over(one, x, 2, layer, group, 10)
    assert handoff is not None
    assert handoff.wait()
    return is_right(handoff, case, x, 2, layer, group)  # type: ignore[arg-type]


@by_dtype
def test_a_pass_after_the_other(case: HostCase, pool: StreamPool) -> None:
    """The last one is dropped half way."""
    before, other = counters_of(pool), begun(pool)
    for number in range(3):
        poison(pool)
        one = begun(pool)
        for tokens, group, layer in ((5, "qkv", 0), (MAX_TOKENS, "down", 1), (1 + number, "gate_up", 0)):
            assert handed_over(pool, one, case, tokens, group, layer)
        assert hand_over(one, draw_x(1, 40, case.host.torch_dtype), 0, 0, "qkv", 1) is None, "it has had its steps"
        assert pool.begin_pass() is None, "it still has its slot"
        one.end()
        assert not one.failed
    one, x = begun(pool), draw_x(9, 40, case.host.torch_dtype)
    handoff = one.open(x, [Segment(2, 5, 3), Segment(0, 4, 4)], 0, "qkv")
    assert handoff is not None and handoff.wait()
    for rows, slot in ((slice(0, 5), 2), (slice(5, 9), 0)):
        found = SimpleNamespace(outputs=[y[rows] for y in handoff.outputs])
        assert is_right(found, case, x[rows], slot, 0, "qkv")  # type: ignore[arg-type]
    one.end()
    assert counted(pool, before).handoffs == 10
    assert not counted(pool, before).quarantined

    one, later = begun(pool), list[StreamPass]()
    assert hand_over(one, draw_x(8, 40, case.host.torch_dtype), 2, 0, "qkv", 4) is not None
    one.end()  # half way: its last handoff was signalled and not awaited

    def began() -> bool:
        found = pool.begin_pass()
        later.extend([found] if found is not None else [])
        return bool(later)

    eventually(began)  # its slot is free once the worker has answered
    assert not one.failed
    assert all(worker.commands == 0 for worker in pool._keeper.workers)
    later[0].end()
    other.end()


class CrowdedStreamPool(CrowdedPool, StreamPool):
    """Two workers, on whatever cores there are."""


@by_dtype
def test_workers_split_weights(case: HostCase) -> None:
    """Step after step of a pass, over the same areas."""
    layout = Layout(1, 2, MAX_TOKENS, case.widths, DTYPES.index(case.host.torch_dtype), steps=4)
    pool = CrowdedStreamPool(case.host, layout, range(2), CPU, HostKernels(), LONG, LONG)
    try:
        pool.start()
        assert pool.wait_ready(LONG) == 2
        pool.arm()
        poison(pool)
        one = begun(pool)
        for number in range(4):
            x = draw_x(9, 40, case.host.torch_dtype, number)
            handoff = one.open(x, [Segment(2, 5, 99, 2 * MIN_SHARE), Segment(0, 4, 99, MIN_SHARE)], 0, "gate_up")
            assert handoff is not None and len(one.handoffs[-1]) == 2 and handoff.wait()
            for rows, slot in ((slice(0, 5), 2), (slice(5, 9), 0)):
                found = SimpleNamespace(outputs=[y[rows] for y in handoff.outputs])
                assert is_right(found, case, x[rows], slot, 0, "gate_up")  # type: ignore[arg-type]
        one.end()
        assert not one.failed and not counters_of(pool).quarantined
    finally:
        pool.close()


@by_one_dtype
def test_what_the_device_has_not_finished_is_nobody_elses(
    case: HostCase, pool: StreamPool, held: list[HeldEvent]
) -> None:
    """Neither the slot of a pass, nor the workers' attention."""
    other, one = begun(pool), begun(pool)
    assert handed_over(pool, one, case, 5, "qkv", 0)
    pool.disarm()
    one.end()
    assert pool.begin_pass() is None
    assert counters_of(pool).in_quarantine == 1
    assert pool._armed == 1
    held[0].over = True
    pool.poll()
    assert pool._armed == 0
    assert pool.begin_pass() is None
    held[1].over = True
    later = begun(pool)
    assert counters_of(pool).in_quarantine == 0
    pool.arm()
    end_all(pool, held, [other, later])


def end_all(pool: StreamPool, held: list[HeldEvent], passes: list[StreamPass]) -> None:
    """The device finishes what it has."""
    for one in passes:
        one.end()
    for event in held:
        event.over = True
    pool.poll()


@by_one_dtype
def test_a_worker_that_is_late_and_then_dies(case: HostCase, pool: StreamPool) -> None:
    """Its pass fails, its later steps reach nobody, its slot is quarantined until the worker has answered or ended."""
    (pid,), before, usual = pool.pids(), counters_of(pool), pool.wait_ns
    os.kill(pid, signal.SIGSTOP)
    try:
        one, x = begun(pool), draw_x(4, 40, case.host.torch_dtype)
        pool.wait_ns = 50_000_000
        for _ in range(2):
            handoff = hand_over(one, x, 2, 0, "qkv", 4)
            assert handoff is not None
            handoff.wait()
        pool.wait_ns = usual
        assert one.failed
        one.end()
        assert (counted(pool, before).timeouts, counters_of(pool).in_quarantine) == (1, 1)
        assert pool.usable == 0
        other = begun(pool)
        assert other.slot != one.slot
        assert hand_over(other, x, 2, 0, "qkv", 4) is None, "a late worker gets nothing new"
        other.end()
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: not counters_of(pool).in_quarantine)
    first, second = (parts[0] for parts in one.handoffs)
    assert pool.memory.command_value(first.at, 0) == first.value
    assert pool.memory.command_value(second.at, 0) != second.value
    again = begun(pool)
    assert handed_over(pool, again, case, 4, "o", 1)
    again.end()
    eventually(lambda: not counters_of(pool).in_quarantine)

    os.kill(pid, signal.SIGSTOP)
    one = begun(pool)
    handoff = hand_over(one, draw_x(4, 40, case.host.torch_dtype), 2, 0, "qkv", 4)
    assert handoff is not None
    os.kill(pid, signal.SIGKILL)
    handoff.wait()
    assert one.failed
    one.end()
    eventually(lambda: not counters_of(pool).in_quarantine)
    assert pool.wait_ready(LONG) == 1
    last = begun(pool)
    assert handed_over(pool, last, case, 4, "o", 1)
    last.end()


@by_one_dtype
def test_a_worker_that_dies_holds_up_the_stream_no_longer_than_its_end_takes(case: HostCase, pool: StreamPool) -> None:
    """Not until the wait's own limit. What is written when it has ended is not awaited either."""
    (pid,), begin = pool.pids(), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    one, x = begun(pool), draw_x(4, 40, case.host.torch_dtype)
    handoff = hand_over(one, x, 2, 0, "qkv", 4)
    assert handoff is not None
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    handoff.wait()
    assert one.failed
    one.end()
    eventually(lambda: not counters_of(pool).in_quarantine)
    assert pool.wait_ready(LONG) == 1
    write, (worker,) = pool.write, pool._keeper.workers

    def written(*given: Any) -> list[Part]:
        os.kill(worker.process.pid, signal.SIGKILL)
        eventually(lambda: worker.ended)
        return write(*given)

    pool.write = written  # type: ignore[method-assign]
    two = begun(pool)
    handoff = hand_over(two, x, 2, 0, "qkv", 4)
    assert handoff is not None
    handoff.wait()
    assert two.failed
    two.end()
    pool.write = write  # type: ignore[method-assign]
    assert pool.wait_ready(LONG) == 1
    assert time.monotonic() - begin < LONG / 2
    eventually(lambda: not counters_of(pool).in_quarantine)
    for _ in range(3):
        three = begun(pool)
        assert handed_over(pool, three, case, 4, "o", 1)
        assert not three.failed
        three.end()


@by_one_dtype
def test_rows_are_held_until_the_device_is_through(case: HostCase, pool: StreamPool, held: list[HeldEvent]) -> None:
    one, two = begun(pool), begun(pool)
    assert not one.quiet
    for each in (one, two):
        assert handed_over(pool, each, case, 4, "o", 1)
        each.end()
    held[1].over = True
    pool.poll()
    assert (one.quiet, two.quiet) == (False, True)
    held[0].over = True
    pool.poll()
    assert one.quiet
    end_all(pool, held, [])


@by_one_dtype
def test_the_check_before_use(pool: StreamPool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(HostKernels):
        def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, given: Signal) -> None:
            super().copy_and_signal(x + x, target, ticket, given)

    pool.check()
    cost = measure_handoff(pool, CPU, 1)
    assert cost.latency >= 0 and cost.bandwidth > 0
    monkeypatch.setattr(pool, "kernels", Wrong())
    with pytest.raises(BrokenHandoff, match="differ from those that were sent to the CPU workers"):
        pool.check()
