"""The load step's figures, plot and sentence, from a run that is made up: its answers can be counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.autoscale.autoscale import Observations, figures_of, rows_of
from benchmarks.autoscale.tables import autoscale_plot, autoscale_text
from benchmarks.common.latency import Sample
from benchmarks.pages.plots import save

STEPS = ((1, 10.0), (80, 20.0), (0, 10.0))


def sample(sent: float, ttft: float, error: str = "") -> Sample:
    return Sample("m", sent=100.0 + sent, times=[100.0 + sent + ttft], end=100.0 + sent + ttft, error=error)


def look(at: float, callers: int, ready: int) -> dict[str, Any]:
    return {"at": at, "callers": callers, "open": callers, "ready": ready, "desired": ready, "demand": 0.1}


def run() -> Observations:
    observed = Observations(begin=100.0)
    observed.looks = [look(0.0, 1, 0), look(8.0, 1, 1), look(10.0, 80, 1), look(22.0, 80, 3), look(30.0, 80, 3)]
    observed.looks += [look(32.0, 0, 3), look(40.0, 0, 0)]
    observed.samples = [sample(0.0, 7.5), sample(9.0, 0.1), sample(11.0, 2.0), sample(12.5, 4.0), sample(12.6, 3.0)]
    observed.samples += [sample(25.0, 0.5), sample(26.0, 9.0, "503")]
    return observed


def document() -> dict[str, Any]:
    moves = [
        {"seen": 101.0, "action": "set", "size": 0, "wanted": 1, "reason": "requests are there"},
        {"seen": 103.0, "action": "set", "size": 1, "wanted": 1, "reason": "nodes that were missing"},
        {"seen": 105.0, "action": "none", "size": 1, "wanted": 1, "reason": "requests are there"},
    ]
    settings = {"steps": [list(step) for step in STEPS], "pool": {"max": 3}, "model": "m", "dtype": "float32"}
    versions = {"torch": "2", "transformers": "5", "peft": "0"}
    machine = {"cpu": "some", "cores": 2}
    return {
        "study": "autoscale", "commit": "abc", "machine": machine, "versions": versions, "settings": settings,
        "seed": 0, "rows": rows_of(run(), moves), "figures": figures_of(run(), STEPS),
    }  # fmt: skip


def test_figures() -> None:
    figures = document()["figures"]
    assert (figures["requests"], figures["lost"], figures["most_nodes"], figures["nodes_at_end"]) == (7, 1, 3, 0)
    assert (figures["three_nodes_after_s"], round(figures["held_first_call_s"], 6)) == (12.0, 7.5)
    assert round(figures["ttft_p50_ms_before"]) == 3000 and round(figures["ttft_max_ms_before"]) == 4000
    assert round(figures["ttft_p50_ms_three_nodes"]) == 500


def test_rows() -> None:
    (row,) = document()["rows"]
    assert row["moves"] == [{"at": 1.0, "size": 0, "wanted": 1, "reason": "requests are there"}]
    assert [(entry["at"], entry["n"]) for entry in row["ttft"]] == [(0.0, 1), (8.0, 1), (10.0, 1), (12.0, 2), (24.0, 1)]
    assert (row["ttft"][3]["median_s"], row["ttft"][3]["most_s"]) == (3.5, 4.0)


def test_the_page_and_the_plot(tmp_path: Path) -> None:
    text = autoscale_text(document())
    assert "7 requests, 1 lost." in text and "three nodes were ready 12.0 s after the step" in text
    for name in ("one.svg", "two.svg"):
        save(autoscale_plot(document()), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "callers" in (tmp_path / "one.svg").read_text()
