"""Latencies are what docs/results/benchmarks.md says they are, and percentiles are those of another implementation."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.latency import Sample, percentiles, summary


def test_definitions() -> None:
    sample = Sample(
        "a", scheduled_at=9.5, sent=10.0, times=[10.5, 10.75, 11.5], end=12.0, prompt_tokens=7, output_tokens=4
    )
    assert sample.ttft == 0.5
    assert sample.e2e == 2.0
    assert sample.tpt == 0.5
    assert sample.tpot == 0.5
    assert sample.late == 0.5
    assert Sample("a", sent=1.0, times=[2.0], end=3.0, output_tokens=1).tpot is None
    assert Sample("a", sent=1.0).late is None


@given(seconds=st.lists(st.floats(0, 1e4), min_size=2, max_size=60))
def test_percentiles_against_another_implementation(seconds: list[float]) -> None:
    found = percentiles("x", seconds)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    assert found == pytest.approx({f"x_p{p}_ms": cuts[p - 1] * 1e3 for p in (50, 90, 99)}, rel=1e-9, abs=1e-6)


def test_percentiles_of_little() -> None:
    assert percentiles("x", []) == {}
    assert percentiles("x", [0.25]) == {"x_p50_ms": 250.0, "x_p90_ms": 250.0, "x_p99_ms": 250.0}


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    sent = draw(st.floats(0, 100))
    steps = draw(st.lists(st.floats(1e-3, 10), min_size=2, max_size=8))
    moments = np.cumsum([sent, *steps]).tolist()
    error = draw(st.sampled_from(["", "", "429", "cut off"]))
    return Sample("a", None, sent, moments[1:-1], moments[-1], 3, draw(st.integers(1, 9)), error)


@given(drawn=st.lists(samples(), min_size=1, max_size=20))
def test_summary(drawn: list[Sample]) -> None:
    found = summary(drawn)
    good = [sample for sample in drawn if sample.error == ""]
    assert found["ok"] + found["errors"] == found["requests"] == len(drawn)
    assert sum(value for name, value in found.items() if name.startswith("error_")) == found["errors"]
    span = max(s.end for s in drawn) - min(s.sent for s in drawn)
    assert found["seconds"] == pytest.approx(span)
    assert found["tok_s"] * span == pytest.approx(sum(s.output_tokens for s in good))
    assert found["requests_s"] * span == pytest.approx(len(good))
    assert "late_max_ms" not in found
    if not good:
        assert "ttft_p50_ms" not in found
        return
    expected = {
        "ttft": [s.times[0] - s.sent for s in good],
        "e2e": [s.end - s.sent for s in good],
        "tpt": [(s.end - s.sent) / s.output_tokens for s in good],
        "tpot": [(s.end - s.times[0]) / (s.output_tokens - 1) for s in good if s.output_tokens > 1],
        "gap": [gap for s in good for gap in np.diff(s.times)],
    }
    for name, values in expected.items():
        for share in (50, 90, 99):
            if values:
                assert found[f"{name}_p{share}_ms"] == pytest.approx(1e3 * np.percentile(values, share))
            else:
                assert f"{name}_p{share}_ms" not in found


def test_summary_of_nothing() -> None:
    assert summary([]) == {"requests": 0, "ok": 0, "errors": 0}
