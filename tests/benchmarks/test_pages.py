"""The committed reports make the committed tables, and every plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cold_plots import ratios_plot, timeline_plot
from benchmarks.plots import cpu_plot, floor_plot, memory_plot, save
from benchmarks.report import ROOT, load
from benchmarks.rule import WIDTH
from benchmarks.tables import TABLES, committed, render


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_reports(page: Path) -> None:
    text, reports = page.read_text(), committed()
    assert render(page, text, reports) == text
    with pytest.raises(ValueError, match="one pair of markers"):
        render(page, text.replace("<!-- /", "<!-- ", 1), reports)


NARROW = ["README.md", *(f"docs/{name}.md" for name in (
    "benchmarks", "cold-start", "fair-shares", "map", "simulate",
))]  # fmt: skip


@pytest.mark.parametrize("page", NARROW)
def test_lines_fit_a_screen(page: str) -> None:
    """But for an address or a key that can't be cut, inside a block of code."""
    lines = (ROOT / page).read_text().splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("  curl")] == []


def test_plots(tmp_path: Path) -> None:
    """The same report gives the same picture, and the pages show it."""
    plots = {"memory": (memory_plot, "memory"), "kernels-cpu": (cpu_plot, "kernels"),
             "kernels-floor": (floor_plot, "kernels"), "coldstart-ratios": (ratios_plot, "coldstart"),
             "coldstart-request": (timeline_plot, "coldstart")}  # fmt: skip
    for name, (plot, study) in plots.items():
        files = [tmp_path / f"{name}{i}.svg" for i in range(2)]
        for file in files:
            save(plot(load(study)), file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert (ROOT / "docs" / "images" / f"{name}.svg").exists()
        assert any(f"images/{name}.svg" in page.read_text() for page in TABLES)
