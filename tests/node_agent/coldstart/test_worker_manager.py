"""What a node measures with its workers while it is idle, and when it judges them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from node_agent.coldstart import worker_manager
from node_agent.coldstart.auto_workers import JUDGED, TYPICAL
from node_agent.coldstart.calibration import ANSWER, Calibration, Interrupted, never
from node_agent.coldstart.pass_times import MAX_SAMPLES, ROUNDS, CallKind, PassSample, PassTimes, kind_of
from node_agent.coldstart.worker_manager import WorkerManager
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.ipc import ListAdapters
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.kept import as_started
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, make_adapter

LINK = LinkConfig(1e7)
needs_core = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


def manager_of(engine: LocalEngine) -> WorkerManager:
    manager = engine.engine.worker_manager
    assert isinstance(manager, WorkerManager)
    return manager


@pytest.fixture(scope="module")
def kept(stories_dir: Path, load_stories: LoadModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    engine = LocalEngine(
        stories_dir, tmp_path_factory.mktemp("linked") / "registry", load=load_stories, prefix_cache="auto",
        dtype="float32", threads=1, adapter_memory=4 << 20, host_memory=16 << 20, kv_memory=32 << 20, cpu_workers=1,
        load_link=LINK,
    )  # fmt: skip
    with closing(engine):
        assert set(engine.engine.cold_start.unmeasured) == set(JUDGED), "what is judged is measured first"
        yield engine


@pytest.fixture
def linked(kept: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    """An engine whose worker sits behind a link, and which has measured no call."""
    with as_started(kept, monkeypatch):
        yield kept
    manager_of(kept)._retry_at = 0.0


def idle(engine: LocalEngine, gives_way: object = never) -> int:
    """Works until there is nothing to measure. Returns how many slices there were."""
    manager, slices = manager_of(engine), 0
    while manager.work(gives_way):  # type: ignore[arg-type]
        slices += 1
        assert slices < 20
    return slices


@needs_core
def test_workers_take_a_kind_of_call_once_it_was_measured(
    linked: LocalEngine, stories_dir: Path, tmp_path: Path
) -> None:
    """Not on the call that came first, and not on one of another kind."""
    starts = linked.engine.cold_start
    path = make_adapter(stories_dir, tmp_path / "a", 0, r=64, lora_alpha=16, target_modules=ALL_TARGETS)
    adapter, prompts = linked.deploy(path), iter(range(1, 9))  # none that begins as another one

    def layers_cpu() -> int:
        assert linked.engine.store.discard(adapter.digest) or not linked.engine.store.on_device(adapter.digest)
        prompt = [next(prompts), *range(50, 80)]
        request = linked.submit(prompt, 1, adapter, ignore_eos=True)
        linked.run()
        finished = linked.outcomes[request].finished
        assert finished is not None
        return finished.cold_start.layers_cpu

    linked.submit([1, 2], 1, adapter)
    linked.run()
    assert layers_cpu() == 0
    kind = CallKind(tuple(range(7)), 64, 32)
    assert kind in starts.unmeasured and not starts.times.is_measured(kind)
    assert idle(linked) > 0
    assert starts.times.is_measured(kind) and kind not in starts.unmeasured
    for plan in ("wait", "pipeline", "assist"):
        assert len(starts.times.of(kind, plan)) >= ROUNDS
    for sample in starts.times.of(kind, "pipeline"):  # whatever this host measured: workers that gain are asked
        for _ in range(MAX_SAMPLES):
            starts.times.add(PassSample(kind, "assist", sample.forecast, sample.seconds / 4))
    assert layers_cpu() > 0
    linked.assert_clean()
    assert set(linked.engine.store.device) <= {adapter.digest}, "what was lent is back"


@needs_core
def test_a_kind_whose_bounds_overlap_is_measured_further(
    linked: LocalEngine, tmp_path: Path, stories_dir: Path
) -> None:
    """A cold call notes it, up to MAX_SAMPLES passes; it stays without workers meanwhile."""
    directory = make_adapter(stories_dir, tmp_path / "b", 5, r=64, lora_alpha=16, target_modules=ALL_TARGETS)
    adapter, starts, kind = linked.deploy(directory), linked.engine.cold_start, CallKind(tuple(range(7)), 64, 32)
    prompts = iter(range(1, 9))

    def known(count: int) -> None:
        starts.times = PassTimes()
        for plan, middle in (("pipeline", 1.0), ("assist", 0.9)):
            for number in range(count):
                starts.times.add(PassSample(kind, plan, 0.1, 0.1 * middle * (1.9 if number % 2 else 0.1)))

    def called() -> bool:
        starts.unmeasured.clear()
        linked.engine.store.discard(adapter.digest)
        linked.submit([next(prompts), *range(50, 80)], 1, adapter, ignore_eos=True)
        linked.run()
        assert starts.latest is not None and starts.latest.name != "assist"
        return kind in starts.unmeasured

    linked.submit([1, 2], 1, adapter)
    linked.run()
    known(MAX_SAMPLES)
    assert not called()
    known(8)
    assert called()
    assert idle(linked) > 0
    assert len(starts.times.of(kind, "assist")) > 8 and kind not in starts.unmeasured
    linked.assert_clean()


@needs_core
def test_a_call_that_comes_ends_a_measurement_at_once(linked: LocalEngine) -> None:
    """Nothing of the made-up call is left, and the rest is measured later."""
    starts, asked = linked.engine.cold_start, list[int]()

    def soon() -> bool:
        asked.append(1)
        return len(asked) > 5

    starts.unmeasured[TYPICAL] = None
    manager = manager_of(linked)
    assert manager.work(soon)
    assert len(asked) <= 8, "asked before every step"
    assert TYPICAL in starts.unmeasured and starts.mode.plans == ("wait", "pipeline", "assist") and starts.learns
    assert not manager.work(never), "another try only later"
    linked.run()
    linked.assert_clean()
    assert not linked.engine.store.device and not list(linked.engine.store.hosts.all())
    manager._retry_at = 0.0
    idle(linked)
    assert TYPICAL not in starts.unmeasured and starts.times.is_measured(TYPICAL)


@needs_core
def test_a_made_up_call_takes_the_way_of_any_other(linked: LocalEngine) -> None:
    calibration = Calibration(linked.engine, linked.base)
    layout = linked.engine.store.pool.uniform_layout(linked.base, 64, (0, 1, 2))
    for plan in ("wait", "pipeline", "assist"):
        sample = calibration.run(TYPICAL, plan)
        assert (sample.kind, sample.plan) == (kind_of(layout, 64), plan)
        assert 0 < sample.seconds <= sample.first < sample.answer
        if plan != "assist":
            assert sample.first >= layout.live / LINK.bandwidth
    burst = calibration.run(TYPICAL, "pipeline", calls=2)
    assert burst.calls == 2 and burst.first >= layout.live / LINK.bandwidth
    assert not linked.engine.store.device and not list(linked.engine.store.hosts.all())
    with pytest.raises(Interrupted, match="does not fit"):
        calibration.run(CallKind((0,), 8, 1 << 20), "wait")
    with pytest.raises(Interrupted, match="no room"):
        Calibration(linked.engine, linked.base).run(TYPICAL, "wait", calls=100)
    assert ANSWER > 1
    linked.assert_clean()


@needs_core
def test_workers_are_judged_again_when_the_link_has_changed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that turns out eight times slower starts workers on a node that had none; one that recovers ends them."""
    with monkeypatch.context() as patch:  # whatever a busy host measures at the start
        patch.setattr(worker_manager, "judge_link", lambda *_: worker_manager.WorkersDecision(0, "little to gain"))
        engine = make_engine(load_link=LinkConfig(1e9), adapter_memory=4 << 20, host_memory=16 << 20)
    starts, manager = engine.engine.cold_start, manager_of(engine)
    assert starts.decision.count == 0 and starts.link is not None and not idle(engine)
    judged = []

    def judge(times: object, count: int, link: object) -> object:
        judged.append(count)
        return worker_manager.WorkersDecision(count, "they gain")

    monkeypatch.setattr(worker_manager, "judge_calls", judge)
    monkeypatch.setattr(worker_manager, "DECISION_ROUNDS", ROUNDS)
    learn_loads(engine, slower=15)
    engine.engine.store.loader.device_link.config = LinkConfig(1e9 / 60)
    assert manager.work(never)
    pool = manager._starting
    assert pool is not None and starts.decision.count == 0, "none is there before it was measured"
    pool.wait_ready(120.0)
    idle(engine)
    assert engine.engine.assist is not None and judged and starts.decision.reason == "they gain"
    engine.engine.store.loader.device_link.config = LinkConfig(1e9)
    learn_loads(engine, slower=1 / 3)
    monkeypatch.setattr(worker_manager, "judge_link", lambda *_: worker_manager.WorkersDecision(0, "little to gain"))
    assert not manager.work(never), "a judgement's own loads can move the learnt rate"
    manager._judge_at = 0.0
    assert manager.work(never)
    assert engine.engine.assist is None and starts.decision.reason == "little to gain"


@needs_core
def test_loads_that_a_busy_host_slowed_end_no_worker(linked: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle node measures its loads again, finds the link as it was, and drops neither workers nor passes."""
    starts, manager = linked.engine.cold_start, manager_of(linked)
    monkeypatch.setattr(manager, "config", msgspec.structs.replace(manager.config, cpu_workers=None))
    monkeypatch.setattr(manager, "_judged_rate", starts.profile.link.bandwidth if starts.profile else 0.0)
    monkeypatch.setattr(manager, "_judge_at", 0.0)
    starts.times.add(PassSample(TYPICAL, "assist", 0.1, 0.1))
    workers, decision = starts.workers, starts.decision
    learn_loads(linked, slower=3)
    assert manager._link_has_moved()
    assert manager.work(lambda: manager._retry_at == 0.0 and starts.link is not None and not starts.link._loads) is True
    assert manager._retry_at > 0, "an interrupted measurement is tried again later"
    manager._retry_at = 0.0
    learn_loads(linked, slower=3)
    assert manager.work(never) and not manager._link_has_moved()
    assert starts.workers is workers and starts.decision is decision
    assert len(starts.times.of(TYPICAL, "assist")) == 1
    assert len(starts.times.of(TYPICAL, "pipeline")) == worker_manager.CONFIRM_ROUNDS
    linked.assert_clean()


def learn_loads(engine: LocalEngine, slower: float) -> None:
    """Records loads that took `slower` times as long as the profile says."""
    link = engine.engine.cold_start.link
    assert link is not None
    for _ in range(16):
        link.learn(1 << 24, slower * (1 << 24) / link.profile.bandwidth)


@needs_core
def test_every_measured_pass_has_all_of_its_tokens(linked: LocalEngine) -> None:
    """The prefix cache knows no part of a prompt that another measurement drew."""
    assert linked.engine.limits.prefix_cache
    for _ in range(3):
        Calibration(linked.engine, linked.base).run(TYPICAL, "pipeline")
        assert linked.engine.cold_start.outcomes[-1].tokens == TYPICAL.tokens
    linked.assert_clean()


@needs_core
def test_answers_to_an_operator_survive_a_measurement(linked: LocalEngine) -> None:
    """They were asked before it, and come while it goes on."""
    linked.engine.orders.take(ListAdapters("asked"))
    Calibration(linked.engine, linked.base).run(TYPICAL, "wait")
    linked.book()
    assert linked.answers["asked"].id == "asked"
