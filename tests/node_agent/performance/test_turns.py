"""An idle node measures its performance model and cold calls in turn."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node_agent import engine_loop
from node_agent.coldstart.auto_workers import JUDGED
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.performance import idle as idle_module
from node_agent.performance import idle_base
from node_agent.performance.idle import IdleMeasurement
from tests.node_agent.coldstart.idle_work import manager_of
from tests.node_agent.performance.test_idle import loop_of
from tests.support.local_engine import MakeEngine


@pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")
@pytest.mark.parametrize("used_by_others", [0.0, 0.9])
def test_cold_calls_do_not_wait_for_the_performance_model(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_by_others: float
) -> None:
    """Nor does it lose by them what it has measured. On a shared host it pauses between its slices."""
    sizes = {"adapter_memory": 4 << 20, "host_memory": 16 << 20, "kv_memory": 8 << 20}
    engine = make_engine(cpu_workers=1, load_link=LinkConfig(1e8), **sizes)
    starts, passes = engine.engine.cold_start, [0]
    assert set(JUDGED) <= set(starts.unmeasured)
    monkeypatch.setattr(engine_loop, "QUIET_S", 0.0)
    monkeypatch.setattr(idle_base, "others_share", lambda *_: used_by_others)
    monkeypatch.setattr(idle_module, "SLICE_S", 0.05)
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    monkeypatch.setattr(idle_base, "SHARED_PAUSE_S", 0.3)
    turns, until = Turns(), time.monotonic() + 200
    for work in (idle, manager_of(engine)):
        monkeypatch.setattr(work, "work", turns.noted(work.work))
    with loop_of(engine, idle, tmp_path) as (loop, channel, _), selectors.DefaultSelector() as selector:
        loop._stats_at = float("inf")  # nobody reads
        while starts.unmeasured or passes[-1] == passes[0]:
            assert time.monotonic() < until
            if loop._measure(channel, selector):
                passes.append(idle._passes)
        assert not idle.ended and passes == sorted(passes)
        assert starts.unmeasurable == set() and all(starts.times.is_measured(kind) for kind in JUDGED)
        assert turns.taken > 2 and turns.taken_twice == 0
        measured, cases = idle._passes, idle._cases
        while idle._passes == measured:
            assert time.monotonic() < until
            loop._measure(channel, selector)
        assert idle._cases is cases and idle._passes > measured, "it goes on with what it had"
    engine.assert_clean()


class Turns:
    """Notes whose turn it is, among several kinds of idle work."""

    def __init__(self) -> None:
        self.taken = self.taken_twice = 0
        """`taken_twice`: number of turns of work whose turn it was just before, too"""
        self._latest: object = None

    def noted(self, work: Callable[[Callable[[], bool]], bool]) -> Callable[[Callable[[], bool]], bool]:
        def working(should_yield: Callable[[], bool]) -> bool:
            self.taken, self.taken_twice = self.taken + 1, self.taken_twice + (work == self._latest)
            self._latest = work
            return work(should_yield)

        return working


class AlwaysBusy:
    """Idle work that never ends."""

    def __init__(self) -> None:
        self.pieces = 0

    def work(self, should_yield: Callable[[], bool]) -> bool:
        self.pieces += not should_yield()
        return True

    def close(self) -> None:
        return None


def test_the_performance_model_does_not_wait_for_other_work(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine_loop, "QUIET_S", 0.0)
    monkeypatch.setattr(idle_base, "others_share", lambda *_: 0.0)
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    engine.engine.worker_manager = other = AlwaysBusy()
    with loop_of(engine, idle, tmp_path) as (loop, channel, _), selectors.DefaultSelector() as selector:
        loop._stats_at = float("inf")
        worked = 0.0
        for number in range(1, 4):
            assert loop._measure(channel, selector) and loop._measure(channel, selector)
            assert other.pieces == number and idle._worked > worked
            worked = idle._worked
