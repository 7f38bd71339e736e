"""`cpu_workers: auto`: by what was measured, and never because a link is a simulated one."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from cluster.json_file import write_json
from node_agent.coldstart import judgement, setup, worker_manager, worker_start
from node_agent.coldstart.auto_workers import (
    MAX_WORKERS,
    MIN_GAIN,
    SAME_ANSWER,
    SHORT_PROMPT,
    TYPICAL,
    candidate_counts,
    exposed_seconds,
    judge_calls,
    judge_link,
    refusal,
)
from node_agent.coldstart.calibration import Calibration
from node_agent.coldstart.cold_starts import WorkersDecision
from node_agent.coldstart.pass_times import MAX_SAMPLES, ROUNDS, CallKind, PassSample, PassTimes
from node_agent.coldstart.planner import NOT_WORTH
from node_agent.coldstart.profile import LinkCost, Profile, ProfileKey
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from tests.support.local_engine import LocalEngine, MakeEngine

KEY = ProfileKey("", "float32", "cpu", 1, 0)
SIZES = {"adapter_memory": 8 << 20, "host_memory": 16 << 20, "kv_memory": 4 << 20}
needs_core = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def module_engine(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    root = tmp_path_factory.mktemp("auto")
    return LocalEngine(stories_dir, root / "registry", dtype="float32", threads=1, **SIZES)


def profile_of(engine: LocalEngine, load_over_prefill: float) -> Profile:
    """A link over which the judged adapter takes so many of the judged prompt's warm prefills."""
    layer_s, base = 1e-3, engine.base
    size = sum(sum(base.widths[p]) for p in TYPICAL.projections) * TYPICAL.rank * 4 * base.num_layers
    link = LinkCost(0.0, size / (load_over_prefill * layer_s * base.num_layers))
    return Profile(KEY, ((TYPICAL.tokens, layer_s),), None, link)


@pytest.mark.parametrize("load_over_prefill", [0.001, 0.02, 1.0, 5.0])
def test_the_link_alone_decides_whether_there_is_anything_to_gain(
    module_engine: LocalEngine, load_over_prefill: float
) -> None:
    """As much as a layer-by-layer pipeline over equal layers must: the longer of load and prefill, and one layer."""
    store, base, config = module_engine.engine.store, module_engine.base, module_engine.config
    profile = profile_of(module_engine, load_over_prefill)
    warm, exposed = exposed_seconds(store, base, profile, loads=1)
    load, layers = warm * load_over_prefill, base.num_layers
    expected = load / layers + (max(warm, load) - warm) * (layers - 1) / layers
    assert 0.9 * expected <= exposed <= expected + (NOT_WORTH + 1e-6) * warm
    config = msgspec.structs.replace(config, max_cold=2)
    decision = judge_link(config, store, base, profile)
    both = exposed_seconds(store, base, profile, loads=2)[1]
    assert decision.count == (MAX_WORKERS if both >= MIN_GAIN * warm else 0)
    assert f"{exposed * 1e3:.1f} ms" in decision.reason
    figures = dict(decision.figures)
    assert figures == pytest.approx({"warm": warm * 1e3, "exposed": exposed * 1e3, "exposed_shared": both * 1e3})


def test_results_as_large_as_the_weights_leave_nothing_to_gain(
    module_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rank * sum(d_in + d_out) weights against tokens * sum(d_out) results: 384 * 4 to 128 * 64, say."""
    monkeypatch.setattr("node_agent.coldstart.auto_workers.TYPICAL", CallKind(TYPICAL.projections, 4, 64))
    config, store = msgspec.structs.replace(module_engine.config, max_cold=2), module_engine.engine.store
    decision = judge_link(config, store, module_engine.base, profile_of(module_engine, 5.0))
    assert decision.count == 0 and "as many bytes" in decision.reason


def test_settings_that_leave_no_use_for_them(module_engine: LocalEngine) -> None:
    config = module_engine.config
    for changes, word in (({"host_nodes": 2}, "share"), ({"cold_start": "pipeline"}, "cold_start: pipeline")):
        assert word in refusal(msgspec.structs.replace(config, **changes))
    assert not refusal(config)


def calls(first: float, answer: float, plan: str) -> list[PassSample]:
    return [PassSample(TYPICAL, plan, 0.1, 9.0, first * f, answer * f) for f in (0.98, 1.0, 1.5)]


@pytest.mark.parametrize(
    ("first", "answer", "gains"),
    [(0.89, 0.9, True), (0.91, 0.9, False), (0.5, 1.1 * SAME_ANSWER, False), (1.5, 1.5, False)],
)
def test_measured_calls_decide(first: float, answer: float, gains: bool) -> None:
    """The first token a tenth sooner in the median, and the answer no later."""
    times = PassTimes([*calls(1.0, 2.0, "pipeline"), *calls(first, 2.0 * answer, "assist")])
    link = WorkersDecision(MAX_WORKERS, "by the link", (("warm", 3.0),))
    decision = judge_calls(times, 3, link)
    assert decision.count == (3 if gains else 0)
    assert "by the link" in decision.reason and f"{first * 1e3:.1f} ms with 3 workers" in decision.reason
    figures = dict(decision.figures)
    assert figures["first_token_pipeline"] == pytest.approx(1e3) and figures["warm"] == 3.0
    assert figures["answer_assist"] == pytest.approx(2e3 * answer)


def test_workers_that_gain_for_short_prompts_alone_are_kept() -> None:
    short = [
        msgspec.structs.replace(s, kind=SHORT_PROMPT) for s in calls(0.5, 1.0, "pipeline") + calls(0.4, 0.9, "assist")
    ]
    times = PassTimes([*calls(1.0, 2.0, "pipeline"), *calls(0.95, 2.0, "assist"), *short])
    decision = judge_calls(times, 2, WorkersDecision(MAX_WORKERS, "by the link"))
    assert decision.count == 2 and f"{SHORT_PROMPT}, one call: first token 400.0 ms with 2" in decision.reason
    assert dict(decision.figures)["first_token_assist_short"] == pytest.approx(400)
    assert dict(decision.figures)["first_token_assist"] == pytest.approx(950)


def test_the_noise_of_answers_does_not_end_workers_that_gain() -> None:
    """Answers that end 4 % later within 10 % of noise are no later; beyond their noise they are."""
    rng = random.Random(0)

    def noisy(answer: float, noise: float, plan: str, first: float) -> list[PassSample]:
        values = [answer * (1 + noise * (i - 3.5) / 3.5) for i in range(8)]
        rng.shuffle(values)
        return [PassSample(TYPICAL, plan, 1.0, 1.0, first, value) for value in values]

    for noise, gains in ((0.1, True), (0.01, False)):
        times = PassTimes([*noisy(2.0, noise, "pipeline", 1.0), *noisy(2.08, noise, "assist", 0.8)])
        assert judge_calls(times, 1, WorkersDecision(MAX_WORKERS, "by the link")).count == gains


def test_calls_that_could_not_be_measured_start_none() -> None:
    decision = judge_calls(PassTimes(calls(1.0, 2.0, "pipeline")), 3, WorkersDecision(MAX_WORKERS, "by the link"))
    assert decision.count == 0 and "no call could be measured" in decision.reason


@pytest.mark.parametrize(("most", "tried"), [(0, []), (1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_numbers_of_workers_that_are_tried(most: int, tried: list[int]) -> None:
    assert candidate_counts(most) == tried


@pytest.mark.parametrize(("workers", "spares"), [(1, 0), (2, 1), (16, 1)])
def test_a_spare_one_waits_beside_two_or_more(module_engine: LocalEngine, workers: int, spares: int) -> None:
    config = msgspec.structs.replace(module_engine.config, max_rows=8, chunk_tokens=32)
    layout = setup.stream_layout(config, module_engine.base, workers, 0)
    layout.check()
    assert (layout.workers, layout.spares, layout.processes) == (workers, spares, workers + spares)
    assert layout.max_tokens == 32


def test_an_ordinary_cpu_node_starts_none(make_engine: MakeEngine) -> None:
    """Its device is host memory, and a copy takes little."""
    engine = make_engine(cpu_workers=None)
    decision = engine.engine.cold_start.decision
    assert engine.engine.assist is None and decision.count == 0
    assert "little to gain" in decision.reason


class MadeUpCalls(Calibration):
    """Calls that take as long as a test says instead of being served."""

    seconds: ClassVar[dict[str, float]]
    runs: ClassVar[list[str]]

    def run(self, kind: CallKind, plan: str, calls: int = 1) -> PassSample:
        self.runs.append(plan)
        first = self.seconds[plan]
        return PassSample(kind, plan, 0.1, first, first, first + 1.0, calls)


@needs_core
@pytest.mark.parametrize("slow", [False, True])
def test_workers_are_kept_if_measured_calls_gain(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: bool
) -> None:
    """Decided again at the next start, by the profile that was kept, without another measurement."""
    runs, starts = list[str](), list[int]()
    monkeypatch.setattr(MadeUpCalls, "runs", runs, raising=False)
    seconds = {"pipeline": 1.0, "assist": 2.0 if slow else 0.5, "wait": 1.2}
    monkeypatch.setattr(MadeUpCalls, "seconds", seconds, raising=False)
    monkeypatch.setattr(worker_manager, "Calibration", MadeUpCalls)
    make = worker_start.make_pool
    monkeypatch.setattr(worker_start, "make_pool", lambda *of: starts.append(len(of[3])) or make(*of))
    for _ in range(2):
        with closing(
            LocalEngine(
                stories_dir, tmp_path / "registry", dtype="float32", threads=1, load_link=LinkConfig(1e6),
                profile=str(tmp_path / "profile.json"), **SIZES,
            )
        ) as engine:  # fmt: skip
            decision = engine.engine.cold_start.decision
            assert (decision.count > 0) != slow
            assert (engine.engine.assist is None) == slow
            assert ("gain too little" in decision.reason) == slow
    assert runs.count("assist") == len(runs) / 2
    if slow:
        assert len(starts) == 1, "workers that are known to be of no use are not started to see it again"
    else:
        assert len(starts) in (2, 3) and len(set(starts[-2:])) == 1  # fewer than tried first, where all cores are many


@needs_core
def test_calls_of_users_never_stand_for_measured_ones(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a kind that is judged, and so many that they displaced the measured ones: the next start measures again."""
    file = tmp_path / "profile.json"
    monkeypatch.setattr(MadeUpCalls, "runs", [], raising=False)
    monkeypatch.setattr(MadeUpCalls, "seconds", {"pipeline": 1.0, "assist": 0.5, "wait": 1.2}, raising=False)
    monkeypatch.setattr(worker_manager, "Calibration", MadeUpCalls)

    def count() -> int:
        with closing(
            LocalEngine(
                stories_dir, tmp_path / "registry", dtype="float32", threads=1, load_link=LinkConfig(1e6),
                max_cold=1, profile=str(file), **SIZES,
            )
        ) as engine:  # fmt: skip
            return engine.engine.cold_start.decision.count

    kept = count()
    profile = msgspec.json.decode(file.read_bytes(), type=Profile)
    times = PassTimes(profile.passes)
    for sample in profile.passes:
        for _ in range(MAX_SAMPLES):
            times.add(PassSample(sample.kind, sample.plan, 0.1, 0.1))
    write_json(msgspec.structs.replace(profile, passes=times.samples), file)
    assert kept > 0 and count() == kept


@needs_core
def test_a_real_node_measures_real_calls(stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link so slow that workers must gain: the figures are those of the calls."""
    monkeypatch.setattr(judgement, "DECISION_ROUNDS", ROUNDS)
    bandwidth = 5e6
    with closing(
        LocalEngine(
            stories_dir, tmp_path / "registry", dtype="float32", threads=1, load_link=LinkConfig(bandwidth), **SIZES
        )
    ) as engine:  # fmt: skip
        decision, times = engine.engine.cold_start.decision, engine.engine.cold_start.times
        figures = dict(decision.figures)
        assert figures["first_token_pipeline"] > figures["warm"]
        layout = engine.engine.store.pool.uniform_layout(engine.base, TYPICAL.rank, TYPICAL.projections)
        for sample in times.of(TYPICAL, "pipeline"):
            assert layout.live / bandwidth <= sample.first <= sample.answer and sample.seconds <= sample.first
        assert times.of(TYPICAL, "assist") or decision.count == 0
        assert not engine.engine.store.device and not list(engine.engine.store.hosts.all()), "what was lent is back"
        engine.assert_clean()
