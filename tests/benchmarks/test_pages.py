"""The committed reports make the committed tables, and every plot."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.report import ROOT, load
from benchmarks.pages.plots import cpu_plot, floor_plot, memory_plot, save
from benchmarks.pages.tables import TABLES, committed, render
from tests.lint.pages import INDEX, pages, problems


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_reports(page: Path) -> None:
    text, reports = page.read_text(), committed()
    assert render(page, text, reports) == text
    with pytest.raises(ValueError, match="one pair of markers"):
        render(page, text.replace("<!-- /", "<!-- ", 1), reports)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_pages_can_be_read_and_followed(page: Path) -> None:
    assert problems(page) == []


@pytest.mark.parametrize(("text", "problem"), [
    ("a" * 101, "a line of 101 columns"),
    ("[here](nowhere.md)", "which does not exist"),
    ("[here](guide/invoke.md#not-there)", "no such heading"),
    ("|a|b|c|d|e|f|\n|---|---|---|---|---|---|", "a table of 6 columns"),
])  # fmt: skip
def test_what_is_wrong_with_a_page_is_said(text: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = INDEX.with_name("drawn.md")
    monkeypatch.setattr(Path, "read_text", lambda path: text if path == page else path.read_bytes().decode())
    assert [found for found in problems(page) if problem in found]
    assert problems(page)[-1].endswith("not linked from docs/README.md")


def test_plots(tmp_path: Path) -> None:
    """The same report gives the same picture, and the pages show it."""
    plots = {"memory": (memory_plot, "memory"), "kernels-cpu": (cpu_plot, "kernels"),
             "kernels-floor": (floor_plot, "kernels")}  # fmt: skip
    for name, (plot, study) in plots.items():
        files = [tmp_path / f"{name}{i}.svg" for i in range(2)]
        for file in files:
            save(plot(load(study)), file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert (ROOT / "docs" / "images" / f"{name}.svg").exists()
        assert any(f"images/{name}.svg" in page.read_text() for page in TABLES)
