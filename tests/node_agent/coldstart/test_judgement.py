"""A judgement of workers that is not finished stays open: it is continued while the node is idle, and says why."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from node_agent.coldstart import judgement, measure, worker_manager
from node_agent.coldstart.auto_workers import JUDGED, PLANS, TYPICAL
from node_agent.coldstart.calibration import Calibration, Interrupted
from node_agent.coldstart.cost_check import MAX_PAUSE_S, RETRY_S
from node_agent.coldstart.pass_times import ROUNDS, CallKind, PassSample
from node_agent.coldstart.worker_manager import WorkerManager
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.idle_work import manager_of, work_while_idle
from tests.node_agent.coldstart.pools import LONG, eventually
from tests.node_agent.coldstart.slow_node import SIZES, SLOW, SlowNode, gains, judge, nobody_calls, slow_node
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import make_adapter

pytestmark = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


@pytest.fixture
def slow(
    stories_dir: Path, load_stories: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlowNode]:
    """A node that finds out while it is idle that its workers must be judged; they gain, whatever is measured."""
    monkeypatch.setattr(worker_manager, "judge_calls", gains)
    monkeypatch.setattr(judgement, "DECISION_ROUNDS", ROUNDS)
    with slow_node(stories_dir, load_stories, tmp_path) as node:
        node.learn_engine(1 / SLOW)
        judge(node)
        yield node


class Calls:
    """Counts the measured calls, and stands for a caller who comes after some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: list[tuple[CallKind, str, int]] = []
        self.begun = self.polls = 0
        """`polls`: number of polls since the last call began"""
        self.next_caller = 0
        """number of ended calls after which, amid the next call, a caller comes"""
        run = Calibration.run

        def counted(calibration: Calibration, kind: CallKind, plan: str, calls: int = 1) -> PassSample:
            self.begun, self.polls = self.begun + 1, 0
            sample = run(calibration, kind, plan, calls)
            self.ended.append((kind, plan, calls))
            return sample

        monkeypatch.setattr(Calibration, "run", counted)

    def caller_comes(self) -> bool:
        self.polls += 1
        return len(self.ended) >= self.next_caller and self.begun > len(self.ended) and self.polls > 2


def pool_of(manager: WorkerManager) -> WorkerPool:
    pool = manager._starting
    assert pool is not None
    return pool


def is_judged(node: SlowNode) -> bool:
    """The judgement has ended, and its result is stored."""
    starts, manager = node.engine.engine.cold_start, manager_of(node.engine)
    if starts.decision.reason != "they gain":
        return False
    assert starts.workers is not None and manager._starting is None and not manager._is_open
    assert starts.decision.count == starts.workers.limit == node.stored.key.workers > 0
    return True


def test_workers_that_start_too_slowly_are_started_again(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After pauses that grow up to a quarter of an hour; nothing else must change for it."""
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    pauses = []
    with monkeypatch.context() as patch:
        patch.setattr(worker_manager, "START_LIMIT_S", 0.0)
        for _ in range(7):
            assert starts.decision.reason.startswith("not judged yet: workers are starting; rank 64")
            assert manager.work(nobody_calls)
            assert manager._starting is None and starts.workers is None and starts.decision.count == 0
            assert starts.decision.reason.startswith("not judged yet: they were not warm within 0 s; tried again")
            pauses.append(caplog.records[-1].next_try_s)  # type: ignore[attr-defined]
            assert not manager.work(nobody_calls), "not at once"
            manager._judge_pause.until = 0.0
            assert manager.work(nobody_calls), "they are started"
    assert pauses == [min(RETRY_S * 2**n, MAX_PAUSE_S) for n in range(7)]
    assert not manager.work(nobody_calls), "it waits until they are warm"
    pool_of(manager).wait_ready(LONG)
    work_while_idle(slow.engine)
    assert is_judged(slow) and manager._judge_pause.seconds == RETRY_S


def test_workers_that_restart_are_waited_for_before_they_are_measured(slow: SlowNode) -> None:
    """Here they were killed just before the engine's cost changed."""
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    pool_of(manager).wait_ready(LONG)
    work_while_idle(slow.engine)
    pool, profile = starts.workers, starts.profile
    assert is_judged(slow) and pool is not None and profile is not None
    killed = pool.pids()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not set(killed) & set(pool.pids()))
    layer = tuple((tokens, seconds / 2) for tokens, seconds in profile.layer)
    manager._judge_again(msgspec.structs.replace(profile, layer=layer, cpu=None, passes=()))
    while pool.usable < pool.layout.workers:
        assert not manager.work(nobody_calls), "they are not measured"
        assert starts.decision.count > 0 and starts.decision.reason.startswith("not judged yet: workers are starting")
        pool.wait_ready(0.05)
    work_while_idle(slow.engine)
    assert is_judged(slow) and starts.workers is pool


def test_workers_in_use_that_do_not_come_back_stay_to_be_judged(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    pool_of(manager).wait_ready(LONG)
    work_while_idle(slow.engine)
    pool, profile = starts.workers, starts.profile
    assert pool is not None and profile is not None
    manager._judge_again(msgspec.structs.replace(profile, passes=()))
    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "wait_ready", lambda *_: 0)
        patch.setattr(WorkerPool, "usable", 0)
        patch.setattr(worker_manager, "START_LIMIT_S", 0.0)
        assert manager.work(nobody_calls) and not manager.work(nobody_calls)
        assert starts.decision.reason.startswith("not judged yet: they were not warm")
        assert starts.workers is pool
    manager._judge_pause.until = 0.0
    work_while_idle(slow.engine)
    assert is_judged(slow) and starts.workers is pool


def test_workers_that_end_while_they_are_measured_are_started_again(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    pool_of(manager).wait_ready(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "_slice_seconds", lambda *_: None)
        assert manager.work(nobody_calls) and not manager.work(nobody_calls)
    assert starts.workers is None and starts.decision.count == 0
    assert starts.decision.reason.startswith("not judged yet: none answered while they were measured; tried again")
    manager._judge_pause.until = 0.0
    assert manager.work(nobody_calls)
    pool_of(manager).wait_ready(LONG)
    work_while_idle(slow.engine)
    assert is_judged(slow)


def test_a_shortage_ends_no_engine(slow: SlowNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one of descriptors, when workers are started, nor one of KV blocks, when their costs are measured."""
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    pool_of(manager).wait_ready(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(worker_manager, "measure_workers", raising(Interrupted("no KV block is free")))
        assert manager.work(nobody_calls) and not manager.work(nobody_calls)
        assert starts.decision.reason.startswith("not judged yet: no KV block is free; tried again")
        manager._end_workers()
        patch.setattr(worker_manager, "make_workers", raising(OSError(errno.EMFILE, "Too many open files")))
        manager._judge_pause.until = 0.0
        assert manager.work(nobody_calls) and not manager.work(nobody_calls)
        assert starts.decision.reason.startswith("not judged yet: [Errno 24] Too many open files; tried again")
    manager._judge_pause.until = 0.0
    assert manager.work(nobody_calls)
    pool_of(manager).wait_ready(LONG)
    work_while_idle(slow.engine)
    assert is_judged(slow)


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_callers_interrupt_a_judgement_and_end_none_of_its_calls_twice(
    slow: SlowNode, stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gap between them has room for two calls. Callers are served without the workers meanwhile."""
    starts, manager, measured = slow.engine.engine.cold_start, manager_of(slow.engine), Calls(monkeypatch)
    monkeypatch.setattr(worker_manager, "TURN_S", LONG)
    pool = pool_of(manager)
    pool.wait_ready(LONG)
    directory = make_adapter(stories_dir, tmp_path / "a", 0, r=64, target_modules=["q_proj", "k_proj", "v_proj"])
    gaps = 0
    while manager._is_open:
        gaps += 1
        before, measured.next_caller = len(measured.ended), len(measured.ended) + 2
        assert manager.work(measured.caller_comes)
        if not manager._is_open:
            break
        assert len(measured.ended) == before + 2, "no more, and each counts"
        assert not starts.times.answers(TYPICAL, "assist") and pool.limit == pool.layout.workers and starts.learns
        assert starts.decision.count == 0
        assert starts.decision.reason.startswith("not judged yet: calls with them are measured while the node is idle")
        assert not manager._judge_pause.over and manager._judge_pause.seconds == RETRY_S, "no fault of the node"
        if gaps == 2:
            slow.call(directory)
            assert starts.latest is not None and starts.latest.name != "assist"
        manager._judge_pause.until = 0.0
        assert gaps < 100
    assert is_judged(slow) and gaps > 5
    alone = len(judgement.candidate_counts(pool.layout.workers)) + (pool.limit < pool.layout.workers) + 1
    expected = len(PLANS) * (alone * (ROUNDS + 1) + judgement.BURST_ROUNDS * (manager.config.max_cold > 1))
    assert len(measured.ended) == expected
    for plan in PLANS:
        assert all(len(starts.times.answers(kind, plan)) >= ROUNDS for kind in JUDGED)


def test_a_piece_of_a_judgement_is_short(slow: SlowNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one call, so that it ends."""
    manager, measured = manager_of(slow.engine), Calls(monkeypatch)
    monkeypatch.setattr(worker_manager, "TURN_S", 0.0)
    pool_of(manager).wait_ready(LONG)
    for number in range(1, 5):
        assert manager.work(nobody_calls) and len(measured.ended) == number


def test_other_costs_begin_a_judgement_anew_even_while_it_pauses(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its measured calls are of the former costs. And the check of costs does not wait for the judgement."""
    starts, manager, measured = slow.engine.engine.cold_start, manager_of(slow.engine), Calls(monkeypatch)
    pool_of(manager).wait_ready(LONG)
    measured.next_caller = 2
    while len(measured.ended) < 2 or manager._judge_pause.over:
        assert manager.work(measured.caller_comes)
    former, profile, pool = manager._judgement, starts.profile, manager._starting
    assert former is not None and former.times.samples == () and profile is not None, "both were warm-ups"
    slow.engine.engine.store.loader.device_link.config = LinkConfig(slow.true.link.bandwidth / 20)
    slow.learn_link(slower=15)
    judge(slow)
    assert starts.profile is not None and starts.profile.link != profile.link
    assert manager._judgement is None and manager._starting is pool and manager._judge_pause.over
    work_while_idle(slow.engine)
    assert is_judged(slow)


def test_a_judgement_that_fails_at_the_start_is_continued_while_idle(
    stories_dir: Path, load_stories: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_manager, "judge_calls", gains)
    monkeypatch.setattr(judgement, "DECISION_ROUNDS", ROUNDS)

    def no_room(*_: object) -> PassSample:
        raise Interrupted("host memory has no room for a measured adapter")

    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "run", no_room)
        engine = LocalEngine(
            stories_dir, tmp_path / "registry", load=load_stories, dtype="float32", threads=1,
            load_link=LinkConfig(5e6), **SIZES,
        )  # fmt: skip
    with closing(engine):
        starts, manager = engine.engine.cold_start, manager_of(engine)
        assert starts.decision.count == 0
        assert starts.decision.reason.startswith("not judged yet: host memory has no room for a measured adapter; ")
        assert not manager.work(nobody_calls)
        manager._judge_pause.until = 0.0
        work_while_idle(engine)
        assert starts.decision.reason == "they gain" and starts.decision.count > 0
        engine.assert_clean()


def test_a_node_whose_prompts_are_too_short_to_judge_does_not_try_again(
    stories_dir: Path, load_stories: LoadModel, tmp_path: Path
) -> None:
    with closing(
        LocalEngine(
            stories_dir, tmp_path / "registry", load=load_stories, dtype="float32", threads=1, chunk_tokens=32,
            load_link=LinkConfig(5e6), **SIZES,
        )
    ) as engine:  # fmt: skip
        starts = engine.engine.cold_start
        assert starts.decision.count == 0 and starts.workers is None
        assert starts.decision.reason.startswith("a prompt of 64 tokens with 12 more does not fit this node; rank 64")
        assert not work_while_idle(engine)


def test_a_fixed_number_of_workers_is_started_again_while_idle(
    stories_dir: Path, load_stories: LoadModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(measure, "_slice_seconds", lambda *_: None)
        engine = LocalEngine(
            stories_dir, tmp_path / "registry", load=load_stories, dtype="float32", threads=1, cpu_workers=1, **SIZES
        )
    with closing(engine):
        starts, manager = engine.engine.cold_start, manager_of(engine)
        assert engine.engine.assist is None
        assert starts.decision.reason.startswith("not there yet: none answered") and starts.decision.count == 0
        manager._judge_pause.until = 0.0
        assert manager.work(nobody_calls)
        pool_of(manager).wait_ready(LONG)
        assert manager.work(nobody_calls) and engine.engine.assist is not None
        assert (starts.decision.count, starts.decision.reason) == (1, "as set") and set(JUDGED) <= set(
            starts.unmeasured
        )
