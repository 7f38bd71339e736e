"""The placement study runs in its quick form and writes a whole report, which becomes a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scheduling.tables import placement_table
from gateway.scheduling.policy import POLICIES
from tests.benchmarks.studies import run_study


def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    run_study(monkeypatch, "scheduling.placement", "--quick", "--seed", "3", "--json", str(file))
    document = json.loads(file.read_text())
    assert (document["study"], document["seed"]) == ("placement", 3)
    names = {
        f"{name}_{label}_us_at_{nodes}"
        for name in ("scoring", "place")
        for label in ("p50", "p99")
        for nodes in (60, 1000)
    }
    assert names <= set(document["figures"])
    table = placement_table(document)
    assert all(table.count(f" {nodes} | {policy} |") == 1 for policy in POLICIES for nodes in (60, 1000))
    assert table.count("60, over Redis | rank_aware |") == 1
