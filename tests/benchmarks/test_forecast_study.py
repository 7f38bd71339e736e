"""The study of forecasts: its metrics against their definitions, its arrivals against the counts, and a quick run."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.trace import minute_counts
from benchmarks.forecast.replay import metrics, second_arrivals, servegen_arrivals
from benchmarks.forecast.tables import (
    cost_table,
    day_table,
    drift_table,
    function_table,
    popularity_table,
    time_table,
    window_table,
)
from tests.benchmarks.studies import run_study
from tests.support.draws import draws

pairs = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.45, 0.5, 0.9, 1.0]), st.booleans()), min_size=1, max_size=30)


@settings(max_examples=draws(30))
@given(pairs)
def test_metrics(said: list[tuple[float, bool]]) -> None:
    found = metrics(np.array([p for p, _ in said], np.float32), np.array([came for _, came in said]))
    n, calls = len(said), [p for p, came in said if came]
    right = [(p >= 0.5) == came for p, came in said]
    of = [
        np.mean([yes for yes, (_, came) in zip(right, said, strict=True) if came == kind])
        for kind in {came for _, came in said}
    ]
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert found["always_no"] == pytest.approx(1 - len(calls) / n)
    assert found["balanced_accuracy"] == pytest.approx(np.mean(of))
    assert found["brier"] == pytest.approx(np.mean([(p - came) ** 2 for p, came in said]), abs=1e-6)
    losses = [-log(max(p if came else 1 - p, 1e-7)) for p, came in said]
    assert found["log_loss"] == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-6)
    area, recall = 0.0, 0.0
    for threshold in sorted({p for p, _ in said}, reverse=True):
        above = [came for p, came in said if p >= threshold]
        if calls:
            area += sum(above) / len(above) * (sum(above) / len(calls) - recall)
            recall = sum(above) / len(calls)
    assert found["pr_area"] == pytest.approx(area)


def test_arrivals_have_the_trace_counts() -> None:
    minutes = minute_counts()[1::40, :20]
    arrivals = second_arrivals(minutes, 3, 1e9)
    assert len(arrivals.counts) == 1200
    for minute in range(20):
        of = arrivals.counts[60 * minute : 60 * minute + 60]
        total = [sum(second.get(str(function), 0) for second in of) for function in range(len(minutes))]
        assert total == minutes[:, minute].tolist()
    functions = np.arange(len(minutes))
    for second in (0, 17, 600):
        behind = arrivals.counts[second + 1 :]
        expected = [[any(str(each) in of for of in behind[:h]) for h in (1, 5, 30, 300)] for each in functions]
        assert arrivals.arrived(second, functions).tolist() == expected


def test_servegen_arrivals_are_in_their_ten_minutes() -> None:
    arrivals = servegen_arrivals(0, 1)
    assert len(arrivals.counts) == 1440 and arrivals.before.shape == (1441, 41)
    active = (np.diff(arrivals.before, axis=0).reshape(144, 10, 41) > 0).any(axis=1)
    assert 0.1 < active.mean() < 0.6


def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    run_study(monkeypatch, "forecast.forecast", "--quick", "--seed", "3", "--json", str(file))
    document = json.loads(file.read_text())
    figures = document["figures"]
    assert {"accuracy", "ewma_accuracy", "always_no_accuracy", "predict_ms", "memory_mb"} <= set(figures)
    assert figures["accuracy"] > figures["always_no_accuracy"]
    assert all(np.isfinite(value) for row in document["rows"] for value in row.values() if isinstance(value, float))
    tables = (function_table, popularity_table, day_table, time_table, window_table, drift_table, cost_table)
    for write in tables:
        assert "|---|" in write(document)
    assert "On InVitro's 500-function" in function_table(document)
