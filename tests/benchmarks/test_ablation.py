"""The ablation runs in its quick form; its tables are made of what it writes, and differences are paired over seeds."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scheduling.ablation import CASES, pace, paired
from benchmarks.scheduling.ablation_tables import BEFORE, KEPT, confirmed_table, length_table, screen_table
from tests.benchmarks.studies import run_study


def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    variants = ("--variants", "rank_aware,no rank,toppings,minimal")
    run_study(monkeypatch, "scheduling.scheduling", "--quick", "--ablate", "chosen", "--json", str(file), *variants)
    document = json.loads(file.read_text())
    assert {(row["study"], row["case"]) for row in document["rows"]} == {
        (study, case.name) for study in ("sim60", "testbed8") for case in CASES
    }
    assert "attain_no_rank_sim60_papers_1_exact" in document["figures"]
    assert screen_table(document).count("\n| no rank |") == 1
    names = {"rank_aware": KEPT, "no rank": BEFORE}
    for row in document["rows"]:
        row["variant"] = names.get(row["variant"], row["variant"])
    again = [row | {"seed": 2} for row in document["rows"]]
    document["rows"] += again
    assert confirmed_table(document).count("\n| SIM-60 `papers` 1") == 2
    assert "Worst case against the one before" in confirmed_table(document)
    assert "| TESTBED-8 `papers` 0.6 |" in length_table(document)


def test_differences_are_paired_over_seeds() -> None:
    def rows(variant: str, *values: float) -> list[dict[str, Any]]:
        return [{"variant": variant, "seed": seed, "attainment": value} for seed, value in enumerate(values)]

    found = rows("a", 0.5, 0.7, 0.9) + rows("b", 0.4, 0.5, 0.6)
    mean, half = paired(found, "attainment", "a", "b")
    assert mean == pytest.approx(0.2)
    assert half == pytest.approx(4.303 * 0.1 / sqrt(3))


def test_a_nodes_factor_stays_and_its_passes_vary_around_it() -> None:
    exact, error = CASES
    assert {pace(exact, 1, 0)() for _ in range(3)} == {1.0}
    means = []
    for node in range(40):
        drawn = pace(error, 1, node)
        values = [drawn() for _ in range(500)]
        means.append(sum(values) / len(values))
        assert len(set(values)) == 500
    assert sum(means) / 40 == pytest.approx(1.0, abs=0.1)
    assert max(means) - min(means) > 0.3
