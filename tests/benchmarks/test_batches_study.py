"""What the study of batches makes of answers, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.batches.batches import JOINED, QUICK, figures_of, loads_of
from tests.benchmarks.studies import run_study


def answer(function: str, state: str) -> dict[str, Any]:
    return {"function": function, "timing": {"cold_start": {"state": state}}}


def test_cold_calls_that_end_together_waited_for_one_load() -> None:
    together = [answer("f", "host"), answer("f", "host"), answer("g", "none"), answer("f", "none")]
    assert loads_of(together) == 1
    assert loads_of([*together, *[answer("g", "none")] * JOINED, answer("f", "host")]) == 2
    assert loads_of([answer(f"f{number}", "host") for number in range(5)]) == 5


def test_figures_compare_the_orders_by_medians() -> None:
    rows = [
        {"grouped": grouped, "tokens_per_second": rate, "loads": loads}
        for grouped, rate, loads in (
            (True, 30.0, 10), (False, 10.0, 60), (True, 90.0, 99),
            (False, 20.0, 80), (True, 40.0, 12), (False, 10.0, 80),
        )
    ]  # fmt: skip
    figures = figures_of(rows, {"alone_s": [0.1] * 3, "beside_s": [0.125] * 7}, adapters=10)
    assert (figures["over_file_order"], figures["loads_over_adapters"]) == (4.0, 1.2)
    assert (figures["file_order_loads_over_adapters"], figures["interactive_ttft_p95_ratio"]) == (8.0, 1.25)


@pytest.mark.slow
def test_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stories_dir: Path) -> None:
    file = tmp_path / "batches.json"
    run_study(monkeypatch, "batches.batches", "--quick", "--model", str(stories_dir), "--json", str(file))
    found = json.loads(file.read_text())
    assert found["settings"]["calls"] == QUICK.calls
    assert {"over_file_order", "loads_over_adapters", "interactive_ttft_p95_ratio"} <= found["figures"].keys()
    assert found["figures"]["loads_over_adapters"] >= 1, "each adapter was loaded"
