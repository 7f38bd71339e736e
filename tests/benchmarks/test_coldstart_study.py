"""What the cold-start study draws, computes and keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.artifact import LayerBlock
from benchmarks.cold_busy import confined, descendants
from benchmarks.cold_peft import PeftRig
from benchmarks.cold_rig import Run, Served
from benchmarks.cold_settings import (
    HEADLINE,
    MOST_PROMPT,
    OF_CALLS,
    WHOLE,
    _after_own_load,
    figures_of,
    variants_of,
)
from benchmarks.cold_single import interrupted, regret_figures
from benchmarks.cold_stream import earliest, ideal
from benchmarks.coldstart import Study, parse, run_parts
from benchmarks.latency import Sample
from benchmarks.report import rounds_until
from benchmarks.workloads import MOST_ANSWER, SETTINGS, Call, draw_calls, meeting_text
from cluster.messages import ColdStart


@pytest.mark.parametrize("name", SETTINGS)
def test_calls_of_a_setting(name: str) -> None:
    setting = SETTINGS[name]
    calls = draw_calls(setting, 2000, np.random.default_rng(1), 1024, 12)
    assert all(0 <= call.adapter < setting.adapters for call in calls)
    longest = MOST_ANSWER if setting.answers == "trace" else 48
    assert all(1 <= call.prompt_tokens <= 1024 and 1 <= call.output_tokens <= longest for call in calls)
    gaps = np.diff([call.at for call in calls])
    assert abs(gaps.mean() - 1) < 0.1, "the mean gap is the unit"
    counts = np.bincount([call.adapter for call in calls], minlength=setting.adapters)
    if setting.popularity == "distinct":
        assert counts.max() - counts.min() <= 1
    else:
        assert counts[: setting.adapters // 10].sum() > counts[setting.adapters // 2 :].sum(), "the first are hottest"


def test_short_chat_is_as_the_papers_have_it() -> None:
    calls = draw_calls(SETTINGS["S3"], 20_000, np.random.default_rng(2), 1 << 30, 12)
    prompts = np.array([call.prompt_tokens for call in calls])
    assert abs((prompts <= 256).mean() - 0.90) < 0.01
    assert abs((prompts <= 1024).mean() - 0.99) < 0.005


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40), st.floats(1e5, 1e9), st.floats(1e-3, 10))
def test_ideal_is_that_of_a_walk_through_the_layers(sizes: list[int], rate: float, warm: float) -> None:
    """Layer by layer: each begins when it has come and the one before it is done."""
    done, came = 0.0, 0
    for size in sizes:
        came += size
        done = max(done, came / rate) + warm / len(sizes)
    blocks = [LayerBlock(0, size, "", ()) for size in sizes]
    assert ideal(blocks, rate, warm) == pytest.approx(done)
    assert ideal(blocks, rate, warm) >= warm * (1 - 1e-9)
    assert earliest(dict.fromkeys(range(len(sizes)), 0.0), warm, len(sizes)) == pytest.approx(warm)


def test_long_answers_are_those_of_the_trace() -> None:
    """Of 4,000 calls of the trace the middle one has 204 tokens."""
    answers = [call.output_tokens for call in draw_calls(SETTINGS["S3-long"], 4000, np.random.default_rng(3), 1024, 12)]
    assert 180 < np.median(answers) < 230
    assert max(answers) == MOST_ANSWER


def test_a_meeting_is_longer_than_its_setting_has_tokens() -> None:
    """At four letters a token or more it would not be cut."""
    assert len(meeting_text()) > 4 * MOST_PROMPT["meeting"]


def _served(first: float, end: float) -> Served:
    return Served(Sample("", times=[first, end], end=end, output_tokens=2), ColdStart("host", "wait", 0.0, 0.0))


def test_interruptions_are_counted_between_first_token_and_end() -> None:
    stalls = [(0.0, 1.0), (2.5, 3.0), (3.5, 4.5), (9.0, 10.0)]
    run = Run(served=[_served(2.0, 4.0), _served(5.0, 8.0)], stalls=stalls)
    assert interrupted(run) == [((0.5 + 0.5) / 4.0, 2), (0.0, 0)]


def test_figures() -> None:
    def measured(factor: float) -> dict[str, Any]:
        return {
            "ttft": factor, "tpt": factor, "e2e": factor, "tpot": 2 * factor, "others_tpot": factor,
            "exposed_s": [0.0, 0.1 * factor],
            "exposed_share": [0.0, 0.5], "cpu_busy": 0.1, "device_busy": 0.6,
            "calls": {kind: [factor, 3 * factor] for kind in OF_CALLS},
        }  # fmt: skip

    rounds = {"cached": [measured(1.0)] * 3, "full": [measured(f) for f in (1.1, 1.2, 1.5)],
              "full_fourfold": [measured(f) for f in (2.0, 3.0, 4.0)]}  # fmt: skip
    found = figures_of({"part": "S3", "rounds": rounds})
    assert (found["ttft_over_cached_full"], found["ttft_over_cached_full_max_S3"]) == (1.2, 1.5)
    assert (found["full_4x_tokens_per_core"], found["others_tpot_ratio"]) == (3.0, 1.2)
    assert found["exposed_p50_share"] == 0.25
    assert found["e2e_p50_over_cached_full_S3"] == pytest.approx(np.median([1.1, 3.3, 1.2, 3.6, 1.5, 4.5]) / 2)
    assert found["others_tpot_p95_over_cached_full"] == pytest.approx(
        np.percentile([1.1, 3.3, 1.2, 3.6, 1.5, 4.5], 95) / 3
    )
    assert "ttft_over_cached_full" not in figures_of({"part": "S1", "rounds": rounds}), "S3 is the nameless one"


def test_regret_is_against_the_plan_that_was_best_at_each_point() -> None:
    points = [
        {"full": [2.2, 2.1, 9.0], "wait": [2.0, 2.0, 2.0], "pipeline": [3.0] * 3, "assist": [4.0] * 3},
        {"full": [1.0] * 3, "wait": [5.0] * 3, "pipeline": [3.0] * 3, "assist": [1.0] * 3},
    ]
    found = regret_figures({"rows": points})
    assert found["planner_regret"] == pytest.approx(0.1)
    assert found["planner_regret_p50"] == pytest.approx(0.05)


def test_columns() -> None:
    setting = SETTINGS["S3"]
    assert {"assist", "full"} <= set(variants_of(setting, ["fast"]))
    slowed = variants_of(setting, ["slowed"])
    assert slowed[0] == "cached" and {"full_slowed", "full_fourfold"} <= set(slowed) and "full" not in slowed


def test_ways_of_a_setting() -> None:
    """Every way in four settings; in the others those that show whether it is the same there."""
    both = ["fast", "slowed"]
    ways = {"set_adapter", "ondmd", "overlap", "pipeline", "assist", "full", "assist_slowed", "full_slowed"}
    for name in WHOLE:
        assert ways <= set(variants_of(SETTINGS[name], both))
    assert "cached_all_cores" in variants_of(SETTINGS[HEADLINE], both)
    for name in ("S2", "MAF-128", "MAF-512", "S4"):
        assert variants_of(SETTINGS[name], both)[:3] == ["cached", "ondmd", "full"]


class Stepping:
    """A PEFT model whose steps take no time, and which notes for whom they were."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.ready, self.asked = clock, [], []  # type: ignore[var-annotated]

    def model(self, adapter: Path) -> None:
        self.ready.append(adapter)

    def steps(self, adapter: Path, prompt: list[int]) -> Iterator[tuple[int, float]]:
        assert adapter in self.ready
        self.asked.append((adapter, len(prompt)))
        self.clock[0] += 10.0
        while True:
            yield 1, 0.0
            self.clock[0] += 1.0


def test_calls_of_set_adapter_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first is answered; the third when there has been nothing to do for long."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    rig = PeftRig.__new__(PeftRig)
    rig._reference, rig._adapters = Stepping(clock), [Path("a"), Path("b")]  # type: ignore[assignment]
    calls = [Call(0.0, 0, 4, 3), Call(1.0, 1, 2, 1), Call(40.0, 0, 1, 2)]
    run = rig.serve(calls, [[7] * call.prompt_tokens for call in calls], gap=2.0)
    samples = [one.sample for one in run.served]
    assert [sample.times for sample in samples] == [[10.0, 11.0, 12.0], [22.0], [90.0, 91.0]]
    assert [sample.ttft for sample in samples] == [10.0, 20.0, 10.0]
    assert [one.prefill for one in run.served] == [10.0, 10.0, 10.0]
    assert (run.wall, run.device) == (91.0, 33.0)


@pytest.mark.parametrize(("takes", "begun"), [(1.0, 4), (5.0, 2), (11.0, 1)])
def test_no_round_is_begun_that_would_end_too_late(takes: float, begun: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    seen = []
    for index in rounds_until(110.0, 4):
        seen.append(index)
        clock[0] += takes
    assert seen == list(range(begun))


class Scripted(Study):
    """Parts that measure nothing; the third one fails the first time."""

    ran: list[str]
    broken = True

    def prepare(self, part: str) -> None:
        """They need no engine."""

    def run(self, part: str, until: float) -> dict[str, Any]:
        assert until <= time.monotonic() + 60 * self.options.minutes
        self.ran.append(part)
        if part == "S4" and self.broken:
            raise RuntimeError("interrupted")
        return {"part": part}


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    kept = tmp_path / "deep" / "report.json.parts"
    study = Scripted(parse(["--settings", "S1,S2,S4,stream"]), tmp_path)
    study.ran = []
    with pytest.raises(RuntimeError, match="interrupted"):
        run_parts(study, kept)
    study.broken = False
    rows = run_parts(study, kept)
    assert study.ran == ["S1", "S2", "S4", "S4", "stream"]
    assert [row["part"] for row in rows] == ["S1", "S2", "S4", "stream"]
    other = Scripted(parse(["--settings", "S1", "--seed", "5"]), tmp_path)
    other.ran = []
    run_parts(other, kept)
    assert other.ran == ["S1"], "what was measured with other options is not taken over"
    assert json.loads(kept.read_text())["key"]["seed"] == 5


@pytest.mark.parametrize("argv", [["--settings", "S9"], ["--columns", "slow"]])
def test_options_that_mean_nothing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)
    assert "unknown" in capsys.readouterr().err


def test_a_busy_host_has_other_processes_on_its_last_core() -> None:
    """Its children's too; our own cores come back."""
    before = os.sched_getaffinity(0)
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        try:
            assert descendants(parent.pid) == [parent.pid, grandchild]
            with confined([parent.pid]):
                for pid in (parent.pid, grandchild, os.getpid()):
                    assert os.sched_getaffinity(pid) == {max(before)}
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert os.sched_getaffinity(0) == before


def test_others_are_told_from_a_requests_own_load() -> None:
    """Four tokens, the second of which waits for the adapter: only what comes after it is others' doing."""
    assert _after_own_load([1.0, 9.0, 9.5, 10.5]) == pytest.approx(0.75)
    assert _after_own_load([1.0, 9.0]) is None
