"""`cpu_workers: auto`: by what was measured, and never because a link is a simulated one."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from benchmarks.local_engine import LocalEngine, MakeEngine
from node_agent.coldstart import setup
from node_agent.coldstart.auto_workers import LEAST_GAIN, RANK, decide_workers, exposed_seconds
from node_agent.coldstart.planner import NOT_WORTH
from node_agent.coldstart.profile import CpuLora, LinkCost, Profile, ProfileKey
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores

KEY = ProfileKey("", "float32", "cpu", 1, 0)
needs_core = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def module_engine(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    sizes = {"adapter_memory": 8 << 20, "host_memory": 16 << 20, "kv_memory": 4 << 20}
    root = tmp_path_factory.mktemp("auto")
    return LocalEngine(stories_dir, root / "registry", dtype="float32", threads=1, **sizes)


def profile_of(engine: LocalEngine, load_over_prefill: float, worker_s: float | None = None) -> Profile:
    """A link over which the judged adapter takes so many of the judged prompt's warm prefills."""
    layer_s, base = 1e-3, engine.base
    size = sum(sum(base.widths[p]) for p in (0, 1, 2)) * RANK * 4 * base.num_layers
    link = LinkCost(0.0, size / (load_over_prefill * layer_s * base.num_layers))
    return Profile(KEY, ((64, layer_s),), CpuLora(worker_s, 0.0, 0.0) if worker_s is not None else None, link)


@pytest.mark.parametrize("load_over_prefill", [0.001, 0.02, 1.0, 5.0])
def test_by_what_a_load_exposes(module_engine: LocalEngine, load_over_prefill: float) -> None:
    """As much as a layer-by-layer pipeline over equal layers must: the longer of load and prefill, and one layer."""
    store, base, config = module_engine.engine.store, module_engine.base, module_engine.config
    profile = profile_of(module_engine, load_over_prefill)
    warm, exposed = exposed_seconds(store, base, profile, loads=1)
    load, layers = warm * load_over_prefill, base.num_layers
    expected = load / layers + (max(warm, load) - warm) * (layers - 1) / layers
    assert 0.9 * expected <= exposed <= expected + (NOT_WORTH + 1e-6) * warm
    decision = decide_workers(config, store, base, profile, 3)
    both = exposed_seconds(store, base, profile, loads=config.max_cold)[1]
    assert decision.count == (3 if both >= LEAST_GAIN * warm else 0)
    assert f"{exposed * 1e3:.1f} ms" in decision.reason
    assert decide_workers(config, store, base, profile, 0).count == 0


def test_not_where_they_could_not_be(module_engine: LocalEngine) -> None:
    store, base, config = module_engine.engine.store, module_engine.base, module_engine.config
    profile = profile_of(module_engine, 5.0)
    for changes, word in (({"host_nodes": 2}, "share"), ({"cold_start": "pipeline"}, "cold_start: pipeline")):
        decision = decide_workers(msgspec.structs.replace(config, **changes), store, base, profile, 3)
        assert decision.count == 0 and word in decision.reason


def test_as_many_as_are_set_where_they_have_work(module_engine: LocalEngine) -> None:
    store, base, profile = module_engine.engine.store, module_engine.base, profile_of(module_engine, 0.001)
    for cold_start, count in (("auto", 2), ("assist", 2), ("pipeline", 0)):
        config = msgspec.structs.replace(module_engine.config, cpu_workers=2, cold_start=cold_start)
        assert decide_workers(config, store, base, profile, 3).count == count


@pytest.mark.parametrize(("workers", "spares"), [(1, 0), (2, 1), (16, 1)])
def test_a_spare_one_waits_beside_two_or_more(module_engine: LocalEngine, workers: int, spares: int) -> None:
    config = msgspec.structs.replace(module_engine.config, max_rows=8, chunk_tokens=32)
    layout = setup.stream_layout(config, module_engine.base, workers, 0)
    layout.check()
    assert (layout.workers, layout.spares, layout.processes) == (workers, spares, workers + spares)
    assert layout.max_tokens == 32


@needs_core
def test_a_slow_link_alone_starts_none_where_the_engine_has_all_cores(make_engine: MakeEngine) -> None:
    cores = len(os.sched_getaffinity(0))
    engine = make_engine(cpu_workers=None, threads=cores, load_link=LinkConfig(1e6))
    decision = engine.engine.cold_start.decision
    assert engine.engine.assist is None and decision.count == 0
    assert "computes on all cores" in decision.reason


@needs_core
@pytest.mark.parametrize("slow", [False, True])
def test_a_core_that_is_left_gets_a_worker_that_is_fast_enough(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: bool
) -> None:
    """Decided again at the next start, by the profile that was kept."""
    costs, asked = CpuLora(1.0 if slow else 1e-6, 0.0, 0.0), list[object]()
    monkeypatch.setattr(setup, "measure_cpu", lambda *of: asked.append(of) or costs)
    before, starts = os.sched_getaffinity(0), list[object]()
    start = setup._start_workers
    monkeypatch.setattr(setup, "_start_workers", lambda *of: starts.append(of) or start(*of))
    for _ in range(2):
        with closing(
            LocalEngine(
                stories_dir, tmp_path / "registry", dtype="float32", threads=1, load_link=LinkConfig(1e6),
                profile=str(tmp_path / "profile.json"), adapter_memory=1 << 20, host_memory=4 << 20, kv_memory=4 << 20,
            )
        ) as engine:  # fmt: skip
            decision, left = engine.engine.cold_start.decision, len(before) - 1
            assert decision.count == (0 if slow else left)
            assert (engine.engine.assist is None) == slow
            assert ("slower" in decision.reason) == slow
        assert os.sched_getaffinity(0) == before
    assert len(asked) == 1
    assert len(starts) == (1 if slow else 2), "workers that are known to be slow are not started to see it again"
