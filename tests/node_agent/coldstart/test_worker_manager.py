"""What a node measures with its workers while it is idle, and when it judges them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from node_agent.coldstart.auto_workers import JUDGED, TYPICAL
from node_agent.coldstart.calibration import ANSWER, Calibration, Interrupted, never
from node_agent.coldstart.pass_times import MAX_SAMPLES, ROUNDS, CallKind, PassSample, PassTimes, kind_of
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.ipc import ListAdapters
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.idle_work import manager_of, work_while_idle
from tests.node_agent.coldstart.kept import as_started
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import ALL_TARGETS, make_adapter

LINK = LinkConfig(1e7)
needs_core = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


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
    manager_of(kept)._kinds_pause.reset()
    manager_of(kept)._kinds_pause.until = 0.0


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
    assert work_while_idle(linked) > 0
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
    assert work_while_idle(linked) > 0
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
    manager._kinds_pause.until = 0.0
    work_while_idle(linked)
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
