"""The number of workers that a judgement chooses, and what it measures for that."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from node_agent.coldstart import judgement, worker_manager, worker_start
from node_agent.coldstart.auto_workers import JUDGED, PLANS, TYPICAL
from node_agent.coldstart.calibration import Calibration, Interrupted
from node_agent.coldstart.judgement import Judgement
from node_agent.coldstart.pass_times import ROUNDS, CallKind, PassSample
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import LinkConfig
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.idle_work import manager_of
from tests.node_agent.coldstart.pools import LONG
from tests.node_agent.coldstart.slow_node import SIZES, nobody_calls
from tests.support.local_engine import LocalEngine


class MadeUpCalls(Calibration):
    """Calls that take as long as a test says, by the number of workers, instead of being served."""

    firsts: ClassVar[dict[int, float]] = {1: 0.8, 2: 0.5, 4: 0.49}
    """seconds to the first token with workers; without, 1"""
    gap: ClassVar[int] = 1 << 30
    """number of calls after which the next one is interrupted"""
    done: ClassVar[list[tuple[int, CallKind, str, int]]]
    """the calls that ended, with the number of workers"""

    def run(self, kind: CallKind, plan: str, calls: int = 1) -> PassSample:
        workers = self.engine.cold_start.workers
        assert workers is not None
        if len(self.done) % (self.gap + 1) == self.gap:
            self.done.append((0, kind, plan, 0))
            raise Interrupted("a caller came")
        self.done.append((workers.limit, kind, plan, calls))
        first = self.firsts[workers.limit] if plan == "assist" else 1.0
        return PassSample(kind, plan, 0.1, first, first, first + 1.0, calls)


def test_the_chosen_number_of_workers_is_measured_anew(
    stories_dir: Path, load_stories: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the gaps. What decides are calls with that number alone, and without workers."""
    monkeypatch.setattr(judgement, "DECISION_ROUNDS", ROUNDS)
    engine = LocalEngine(stories_dir, tmp_path / "registry", load=load_stories, dtype="float32", threads=1, **SIZES)
    with closing(engine):
        pool = SimpleNamespace(limit=3, layout=SimpleNamespace(workers=4))
        monkeypatch.setattr(engine.engine.cold_start, "workers", pool)
        found = []
        for gap in (1 << 30, 1, 2, 5):
            monkeypatch.setattr(MadeUpCalls, "gap", gap)
            monkeypatch.setattr(MadeUpCalls, "done", [], raising=False)
            judged, users_times = Judgement(4, 2), engine.engine.cold_start.times
            calibration = MadeUpCalls(engine.engine, engine.base)
            measure_all(judged, calibration, pool)  # type: ignore[arg-type]
            assert judged.choose_count() == judged.best == 2
            measure_all(judged, calibration, pool)  # type: ignore[arg-type]
            assert engine.engine.cold_start.times is users_times and pool.limit == 3
            ended = [each for each in MadeUpCalls.done if each[0]]
            alone, burst, chosen = 3 * 2 * (ROUNDS + 1), 2 * judgement.BURST_ROUNDS, 2 * 2 * (ROUNDS + 1)
            assert [each[0] for each in ended] == [1] * 8 + [2] * 8 + [4] * (8 + burst) + [2] * chosen
            assert len(ended) == alone + burst + chosen
            for kind in JUDGED:
                assert [s.first for s in judged.times.answers(kind, "assist")] == [0.5] * ROUNDS
                assert len(judged.times.answers(kind, "pipeline")) >= ROUNDS
            assert not judged.times.burst(TYPICAL, "assist"), "it was measured with four"
            found.append(ended)
        assert all(each == found[0] for each in found)
        after = [plan for _, _, plan, _ in found[0][2:8]]
        assert after == [*PLANS, *PLANS[::-1], *PLANS], "neither is always the first after a gap"


def measure_all(judged: Judgement, calibration: Calibration, pool: WorkerPool) -> None:
    for _ in range(200):
        try:
            if judged.measure(calibration, pool):
                return
        except Interrupted:
            continue
    raise AssertionError("it does not end")


def test_fewer_workers_that_are_as_good_are_kept(
    stories_dir: Path, load_stories: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start in a pool of their own; on a serving node the others sleep. The engine shares its core here."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("NOT RUN: two workers need two cores")
    for module in (worker_manager, worker_start):
        monkeypatch.setattr(module, "worker_cores", lambda _, count, __: cores[:count])
    monkeypatch.setattr(MadeUpCalls, "firsts", {1: 0.5, 2: 0.5})
    monkeypatch.setattr(MadeUpCalls, "done", [], raising=False)
    monkeypatch.setattr(worker_manager, "Calibration", MadeUpCalls)
    with closing(
        LocalEngine(
            stories_dir, tmp_path / "registry", load=load_stories, dtype="float32", threads=1,
            load_link=LinkConfig(1e6), **SIZES,
        )
    ) as engine:  # fmt: skip
        starts, manager = engine.engine.cold_start, manager_of(engine)
        first, profile = starts.workers, starts.profile
        assert first is not None and profile is not None
        assert (starts.decision.count, first.layout.workers, first.limit) == (1, 1, 1)
        monkeypatch.setattr(MadeUpCalls, "gap", 5)
        manager._judge_again(msgspec.structs.replace(profile, passes=()))
        second = manager._starting
        assert second is not None and second is not first and starts.decision.count == 0
        second.wait_ready(LONG, 3)
        for _ in range(100):
            manager.work(nobody_calls)
            manager._judge_pause.until = 0.0
        assert starts.workers is second and (starts.decision.count, second.layout.workers, second.limit) == (1, 2, 1)
        assert "first token 500.0 ms with 1 workers" in starts.decision.reason
