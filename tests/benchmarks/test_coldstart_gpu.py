"""The GPU's cold-start study on a CPU and a tiny shape: every part runs, but for what needs a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import cold_rig, cold_starts, ttft
from benchmarks.gpu.cold_starts import PARTS, PLANS, WAYS, ColdStudy, figures_of
from benchmarks.gpu.parts import failures, run_parts
from node_agent.cores import spare_cores
from node_agent.runner.cuda_runner import CudaRunner


@pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")
def test_every_part_runs_and_one_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise ValueError("no such stream")

    monkeypatch.setattr(cold_starts, "handoff", broken)
    monkeypatch.setattr(cold_starts, "ROUNDS", 1)
    monkeypatch.setattr(cold_rig, "SLOW_RATE", 5e5)  # so small an adapter would be there at once
    cold = ColdStudy(tmp_path, "tiny", "cpu", "auto", quick=True, seed=3)
    assert tuple(cold.parts()) == PARTS
    try:
        rows = run_parts(cold.parts(), {"exact": 0.0}, 1e4, lambda _: None)
    finally:
        cold.close()
    figures = figures_of(rows)
    (failed,) = failures({"rows": rows, "figures": figures})
    assert failed.startswith("handoff: ") and "no such stream" in failed
    assert figures["cases"] >= 1 and figures["mismatches"] == 0
    for name in set(WAYS) - {"cached"}:
        assert figures[f"ttft_over_cached_{name}_r64_t64_gbsfull_n1"] > 0
        assert figures[f"ttft_over_cached_{name}_r64_t16_gbs4_n2"] > 0
    assert "planner_regret" in figures
    (first, *_) = [row for row in rows if row["part"] == "same" and "rank" in row]
    assert first["warm_plain_logprob"] < 0.1 and first["cold_warm_logprob"] < 0.1
    assert first["layers_cpu"] and not first["replays"]


@pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")
def test_the_runner_for_gpus_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PEFT, and with plain torch, which computes no captured step."""
    monkeypatch.setattr(cold_rig, "SLOW_RATE", 5e5)
    cold = ColdStudy(tmp_path, "tiny", "cpu", "cuda", quick=True, seed=3)
    try:
        parts = cold.parts()
        (exact,) = parts["exact"](0.0)
        (_, row) = parts["same"](0.0)
        runner = cold._bench().engine.engine.runner
        assert isinstance(runner, CudaRunner) and runner.feeds
    finally:
        cold.close()
    assert exact["cases"] and not exact["mismatches"] and not exact["problems"]
    assert row["warm_plain_logprob"] < 0.1 and row["layers_cpu"]


def test_figures() -> None:
    times = {f"{name}_ms": 20.0 for name in WAYS}
    point = {"rank": 64, "tokens": 256, "gb_s": None, "loads": 1, **times, "cached_ms": 10.0, "full_ms": 22.0}
    other = {**point, "gb_s": 4.0, f"{PLANS[0]}_ms": 11.0, "full_ms": 11.0}
    rows = [point, other, {"synced_tokens": 64, "stream_ms": 10.0, "synced_ms": 12.0}, {"left_out": "point"}]
    figures = figures_of(rows)
    assert figures["ttft_over_cached_full_r64_t256_gbsfull_n1"] == pytest.approx(2.2)
    assert figures["ttft_over_cached_full_r64_t256_gbs4_n1"] == pytest.approx(1.1)
    assert figures["planner_regret"] == pytest.approx(0.1)
    assert figures["planner_regret_median"] == pytest.approx(0.05)
    assert figures["syncfree_over_sync_64"] == pytest.approx(1.2)
    wrong = {"rows": [{"part": "merged", "wrong": "far off"}], "figures": {"mismatches": 2}}
    assert failures(wrong) == ["merged: far off", "2 answers differ from PEFT's"]


def test_first_tokens_by_way(tmp_path: Path) -> None:
    """Each way's calls, and its median over the warm calls' one."""
    document = ttft.study(tmp_path, "tiny", "cpu", 4, (16, 40), 2, 0)
    assert [(row["tokens"], row["way"]) for row in document["rows"]] == [
        (tokens, way) for tokens in (16, 40) for way in ttft.WAYS
    ]
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in document["rows"])
    found = ttft.figures_of([
        {"tokens": 16, "way": "cached", "ms": [2.0, 4.0, 3.0]}, {"tokens": 16, "way": "full", "ms": [9.0, 6.0, 4.0]},
    ])  # fmt: skip
    assert found == {"ttft_ms_t16": 3.0, "full_over_cached_t16": 2.0}
