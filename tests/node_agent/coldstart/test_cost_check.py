"""A node judges its workers again once it has measured that the link or the engine is not as its profile says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from node_agent.coldstart import cost_check, judgement, worker_manager
from node_agent.coldstart.auto_workers import TYPICAL
from node_agent.coldstart.calibration import Calibration, Interrupted
from node_agent.coldstart.cold_starts import WorkersDecision
from node_agent.coldstart.cost_check import CHECK_PAUSE_S, MAX_PAUSE_S, RETRY_S, CostCheck, Pause
from node_agent.coldstart.measure import SHORT, measure_layers
from node_agent.coldstart.pass_times import ROUNDS, PassSample
from node_agent.coldstart.profile import LinkCost, Profile
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.idle_work import manager_of, work_while_idle
from tests.node_agent.coldstart.slow_node import SLOW, SlowNode, gains, judge, nobody_calls, slow_node
from tests.support.peft_reference import make_adapter

needs_core = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


@pytest.fixture
def slow(stories_dir: Path, load_stories: LoadModel, tmp_path: Path) -> Iterator[SlowNode]:
    with slow_node(stories_dir, load_stories, tmp_path) as node:
        yield node


@needs_core
def test_a_node_first_started_on_a_busy_host_gets_workers_when_idle(
    slow: SlowNode, stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a node with a true profile; and its next start knows it."""
    monkeypatch.setattr(worker_manager, "judge_calls", gains)
    monkeypatch.setattr(judgement, "DECISION_ROUNDS", ROUNDS)
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    slow.call(make_adapter(stories_dir, tmp_path / "a", 0, r=64, target_modules=["q_proj", "k_proj", "v_proj"]))
    assert manager.work(nobody_calls) and slow.check.changes == 1
    assert not manager.work(nobody_calls), "it must be found again, and not at once"
    assert starts.decision.count == 0 and slow.stored.layer[0][1] == pytest.approx(SLOW * slow.true.layer[0][1])
    slow.check.pause.until = 0.0
    assert manager.work(nobody_calls)
    assert slow.stored.layer_seconds(TYPICAL.tokens) < slow.true.layer_seconds(TYPICAL.tokens) * SLOW / 1.3
    assert [tokens for tokens, _ in slow.stored.layer] == [tokens for tokens, _ in slow.true.layer]
    assert starts.device.value == 1.0, "what it had learnt is in the profile now"
    pool = manager._starting
    assert pool is not None and starts.decision.count == 0, "none is there before it was measured"
    pool.wait_ready(120.0)
    work_while_idle(slow.engine)
    decision = starts.decision
    assert decision.reason == "they gain" and starts.workers is not None
    assert decision.count == starts.workers.limit == slow.stored.key.workers > 0
    assert slow.judge_link().count >= decision.count and slow.stored.cpu is not None


@needs_core
def test_a_link_that_got_slower_starts_workers_and_one_that_recovers_ends_them(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_manager, "judge_calls", gains)
    monkeypatch.setattr(judgement, "DECISION_ROUNDS", ROUNDS)
    starts, manager, device_link = slow.engine.engine.cold_start, manager_of(slow.engine), slow.engine.engine.store
    bandwidth = slow.true.link.bandwidth
    slow.learn_link(slower=15)
    device_link.loader.device_link.config = LinkConfig(bandwidth / 20)
    judge(slow)
    pool = manager._starting
    assert pool is not None and slow.stored.link.bandwidth < bandwidth / 4
    pool.wait_ready(120.0)
    work_while_idle(slow.engine)
    assert starts.workers is not None and starts.decision.reason == "they gain"
    device_link.loader.device_link.config = LinkConfig(bandwidth)
    slow.learn_link(slower=1 / 3)
    monkeypatch.setattr(worker_manager, "judge_link", lambda *_: WorkersDecision(0, "little to gain"))
    assert not manager.work(nobody_calls), "a judgement's own loads can move the learnt rate"
    judge(slow)
    assert starts.workers is None and starts.decision.reason == "little to gain"
    assert slow.stored.link.bandwidth > bandwidth / 12, "stored with the decision for none, too"


def test_the_profile_is_stored_when_none_are_started(slow: SlowNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the next start would measure and judge all of it again."""
    monkeypatch.setattr(worker_manager, "judge_link", lambda *_: WorkersDecision(0, "nothing to gain"))
    slow.learn_engine(1 / SLOW)
    judge(slow)
    assert slow.engine.engine.cold_start.decision == WorkersDecision(0, "nothing to gain")
    assert slow.stored.layer == slow.engine.engine.cold_start.profile.layer  # type: ignore[union-attr]
    assert slow.stored.layer_seconds(64) < SLOW * slow.true.layer_seconds(64) / 1.3


def test_a_busy_node_judges_nothing_and_keeps_what_it_learnt(slow: SlowNode) -> None:
    """A call that comes at any step of the measurement ends it; it is tried again later."""
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    slow.learn_engine(1 / SLOW)
    learnt, profile = (starts.link, starts.device), starts.profile
    assert not manager.work(lambda: True) and slow.check.pause.over
    for polls in (1, 5, 40, 200):
        asked = [0]

        def busy(asked: list[int] = asked, polls: int = polls) -> bool:
            asked[0] += 1
            return asked[0] > polls

        slow.check.pause.until = 0.0
        assert manager.work(busy)
        if slow.check.changes:
            break  # it ended before that many polls
        assert asked[0] <= polls + 4, "asked before each step"
        assert (starts.link, starts.device) == learnt and starts.learns
        assert not manager.work(nobody_calls), "another try only later"
        assert slow.check.pause.seconds == CHECK_PAUSE_S, "no fault of the node"
        slow.engine.run()
        slow.engine.assert_clean()
        assert not slow.engine.engine.store.device and not list(slow.engine.engine.store.hosts.all())
    assert starts.profile is profile and starts.decision.count == 0
    slow.check.pause.until = 0.0
    starts.device = cost_check.engine_correction()  # the learnt value may fade meanwhile
    assert manager.work(nobody_calls) and slow.check.changes


def test_passes_without_an_adapter_end_within_a_layer(slow: SlowNode) -> None:
    engine, asked = slow.engine.engine, list[int]()

    def busy() -> bool:
        asked.append(1)
        return len(asked) == 8

    free = engine.blocks.free
    with pytest.raises(Interrupted):
        measure_layers(engine.runner, engine.blocks, SHORT.tokens, 3, False, busy)
    assert len(asked) == 8 and engine.blocks.free == free


def test_a_node_without_room_to_measure_waits_longer_and_longer(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps what calls have taught it, and says that it could not measure."""
    starts, manager, hosts = slow.engine.engine.cold_start, manager_of(slow.engine), slow.engine.engine.store.hosts
    monkeypatch.setattr(hosts, "lend", lambda *_: None)
    pauses = []
    with caplog.at_level(logging.WARNING, logger="garnish.engine"):
        for _ in range(6):
            slow.learn_engine(1 / SLOW)
            learnt = starts.device
            slow.check.pause.until = 0.0
            assert manager.work(nobody_calls) and starts.device is learnt
            pauses.append(caplog.records[-1].next_check_s)  # type: ignore[attr-defined]
            assert not manager.work(nobody_calls)
    assert pauses == [60.0, 120.0, 240.0, 480.0, MAX_PAUSE_S, MAX_PAUSE_S]
    assert "no room" in caplog.records[-1].reason  # type: ignore[attr-defined]
    assert starts.decision.count == 0


def test_a_busy_moment_changes_nothing(slow: SlowNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that one measurement finds, and the next one does not, is none; nor is one that none finds."""
    starts, manager, profile = (
        slow.engine.engine.cold_start,
        manager_of(slow.engine),
        slow.engine.engine.cold_start.profile,
    )
    monkeypatch.setattr(cost_check, "MOVED", 1.5)
    slow.learn_engine(1 / SLOW)
    assert manager.work(nobody_calls) and slow.check.changes == 1
    monkeypatch.setattr(cost_check, "MOVED", 1e9)  # whatever a busy host measures
    slow.check.pause.until = 0.0
    assert manager.work(nobody_calls) and slow.check.changes == 0
    assert starts.profile is profile and starts.decision.count == 0 and starts.device.value == 1.0
    assert len(starts.times.of(TYPICAL, "pipeline")) >= cost_check.ROUNDS, "measured calls stay of use"
    slow.check.pause.until = 0.0
    assert not manager.work(nobody_calls), "no call has shown a change since"


def test_two_different_findings_confirm_nothing(slow: SlowNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy moment may slow a load once, and a pass another time; and what was found once alone is not stored."""
    starts, check = slow.engine.engine.cold_start, slow.check
    before = starts.profile
    assert before is not None
    link = LinkCost(0.0, before.link.bandwidth / 2)
    faster, slower = (
        tuple((tokens, factor * seconds) for tokens, seconds in before.layer) for factor in (1 / SLOW, 2.0)
    )
    found = [{"link": link}, {"layer": slower}, {"layer": faster}, {"layer": faster, "link": link}]
    profiles = iter(msgspec.structs.replace(before, **each) for each in found)
    monkeypatch.setattr(CostCheck, "_measured", lambda *_: next(profiles))
    judged, pauses = list[Profile | None](), list[float]()
    for _ in found:
        judged.append(check.measure(nobody_calls))
        pauses.append(check.pause.seconds)
    assert pauses == [CHECK_PAUSE_S, 2 * CHECK_PAUSE_S, 4 * CHECK_PAUSE_S, CHECK_PAUSE_S], (
        "noise is measured less often"
    )
    assert judged[:3] == [None, None, None] and check.changes == 0
    assert judged[3] == msgspec.structs.replace(before, layer=faster)


@needs_core
def test_workers_that_cannot_be_measured_are_tried_less_and_less_often(
    slow: SlowNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_manager, "judge_calls", gains)
    monkeypatch.setattr(judgement, "DECISION_ROUNDS", ROUNDS)
    starts, manager = slow.engine.engine.cold_start, manager_of(slow.engine)
    slow.learn_engine(1 / SLOW)
    judge(slow)
    pool = manager._starting
    assert pool is not None
    pool.wait_ready(120.0)
    run = Calibration.run

    def no_room(*_: object) -> PassSample:
        raise Interrupted("host memory has no room for a measured adapter")

    monkeypatch.setattr(Calibration, "run", no_room)
    for seconds in (RETRY_S, 2 * RETRY_S):
        assert manager.work(nobody_calls) and not manager.work(nobody_calls)
        assert caplog.records[-1].next_try_s == seconds  # type: ignore[attr-defined]
        manager._judge_pause.until = 0.0
    monkeypatch.setattr(Calibration, "run", run)
    assert work_while_idle(slow.engine) and starts.decision.reason == "they gain" and manager._starting is None


def test_a_pause_grows_up_to_its_maximum() -> None:
    pause = Pause(300.0)
    assert pause.over and [pause.lengthen() for _ in range(4)] == [300.0, 600.0, MAX_PAUSE_S, MAX_PAUSE_S]
    assert not pause.over
    pause.reset()
    assert pause.seconds == 300.0
