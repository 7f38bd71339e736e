"""README's figures: of all settings that were measured, from the committed reports."""

from __future__ import annotations

import copy
import re
import statistics
from typing import Any

import pytest

from benchmarks.common.report import ROOT
from benchmarks.common.rule import WIDTH
from benchmarks.engine.tables import engine_table
from benchmarks.gateway.rounds import figures_of, pairs
from benchmarks.gpu.tables import gpu_regret_text
from benchmarks.pages import front_page
from benchmarks.pages.front_page import peft_ratios
from benchmarks.pages.tables import TABLES, committed, render
from benchmarks.scheduling.policy_cases import bed_cases, case_lines, simulated_cases, verdict
from benchmarks.serve.tables import serve_table
from tests.lint.pages import LINK

README = ROOT / "README.md"


LEVEL = "SSE9"
"""One that no host has."""


def held_to_a_level(reports: dict[str, Any]) -> dict[str, Any]:
    """The reports with the engine's and serving's once more, half as fast, at another level."""
    more = dict(reports)
    for name in ("engine", "serve"):
        report = copy.deepcopy(reports[name])
        report["settings"]["level"] = LEVEL
        for key in report["figures"]:
            if key.startswith("over_peft"):
                report["figures"][key] /= 2
        more[f"{name}_avx2"] = report
    return more


def test_a_second_level_is_another_setting() -> None:
    reports = {name: report for name, report in committed().items() if not name.endswith("_avx2")}
    one, both = peft_ratios(reports), peft_ratios(held_to_a_level(reports))
    assert (one.count, both.count) == (3, 6)
    assert both.worst == one.worst / 2 and both.median < one.median
    text = render(README, README.read_text(), held_to_a_level(reports))
    assert text.count(f"({LEVEL})") == 2 and "engine_avx2.json" in text and "serve_avx2.json" in text
    page = ROOT / "docs" / "results" / "benchmarks.md"
    blocks = render(page, page.read_text(), held_to_a_level(reports))
    assert blocks.count(f"({LEVEL})**") == 2
    for table, name in ((engine_table, "engine"), (serve_table, "serve")):
        both_levels = [held_to_a_level(reports)[key] for key in (name, f"{name}_avx2")]
        assert all(table(report) in blocks for report in both_levels)


def test_benefits_are_six_lines_that_fit() -> None:
    lines = front_page.benefits(committed()).splitlines()
    assert len(lines) == 6 and all(line.startswith("- **") and len(LINK.sub("]", line)) <= WIDTH for line in lines)


def test_bursts_on_a_gpu_are_those_at_the_links_own_rate() -> None:
    """Of all numbers of calls that the report's figures name, and of both ways."""
    report = committed()["gpu_suite_cold"]
    name = re.compile(r"coldstart_ttft_over_cached_(pipeline|full)_r64_t256_gbsfull_n(?!1$)\d+")
    wanted = sorted(value for key, value in report["figures"].items() if name.fullmatch(key))
    assert len(wanted) == 8 and sorted(front_page.gpu_burst_ratios(report)) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("name", ["gpu_suite", "gpu_suite_cold"])
def test_the_worst_regret_on_a_gpu_is_the_reports(name: str) -> None:
    """Its worst is at one of the points of one call, in both."""
    report = committed()[name]
    worst = report["figures"]["coldstart_planner_regret"]
    found = re.search(r"(\d+)% at worst", " ".join(gpu_regret_text(report).split()))
    assert found and int(found[1]) / 100 == pytest.approx(worst, abs=0.006)


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", README.read_text()):
        target = ROOT / link[0]
        assert target.exists(), link[0]
        if link[1]:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            assert link[1] in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, link


def test_readme_states_no_figure_elsewhere() -> None:
    """Nothing that was measured stands outside the regions that the script writes."""
    text = re.sub(r"<!-- (figures[^>]*) -->.*?<!-- /\1 -->", "", README.read_text(), flags=re.DOTALL)
    assert re.findall(r"\d[\d.,]* ?(?:ms\b|us\b|s\b|%|x\b|times\b|tok)", text) == []


def test_status_names_what_never_ran() -> None:
    reports: dict[str, Any] = copy.deepcopy(dict(committed()))
    for report in reports.values():
        report["machine"]["gpu"] = None
    assert "**Never run:** a real AWS account, a GPU." in front_page.status(reports)
    reports["kernels"]["machine"]["gpu"] = "NVIDIA X"
    text = front_page.status(reports).replace("\n> ", " ")
    assert "**Never run:** a real AWS account, a whole service on a GPU." in text
    assert "**On a GPU** (NVIDIA X): [engines alone](docs/results/gpu.md)." in text
    reports["gpu_service"]["machine"]["gpu"] = "NVIDIA X"
    text = front_page.status(reports).replace("\n> ", " ")
    assert "**Never run:** a real AWS account, several GPU hosts." in text
    assert "**On a GPU** (NVIDIA X): [engines and a whole service](docs/results/gpu.md)." in text


def test_the_gateway_counts_all_rounds() -> None:
    report = committed()["gateway"]
    rounds = list(pairs(report["rows"]))
    added = [through["ttft_p50_ms"] - direct["ttft_p50_ms"] for direct, through in rounds]
    found = figures_of(report["rows"])
    assert found["ttft_added_p50_ms"] == statistics.median(added)
    assert found["ttft_added_p50_max_ms"] == max(added)
    assert found["rounds"] == len(rounds) == report["settings"]["rounds"]
    for name, value in found.items():
        assert report["figures"][name] == pytest.approx(value, abs=1e-3), name
    with pytest.raises(ValueError, match="round"):
        figures_of(report["rows"][1:-1])


def test_cases_also_show_where_another_policy_wins() -> None:
    reports = committed()
    cases = bed_cases(reports["testbed"]["rows"])
    rows = [row for row in reports["testbed"]["rows"] if row["study"] == "testbed8"]
    assert len(cases) == len({(row["profile"], row["load"]) for row in rows})
    assert sum(len(case.other_results) + 1 for case in cases) == len(rows)
    lost = [case for case in cases if case.attainment_gap < 0]
    assert all(case.steadiest_other.attainment > case.ours.attainment for case in lost)
    text = "\n".join(case_lines(cases))
    assert all(f"{case.steadiest_other.attainment:.1%}, {case.steadiest_other.policy}" in text for case in lost)
    won = sum(case.ours.tpt_ms < min(other.tpt_ms for other in case.other_results) for case in cases)
    assert f"lowest mean TPT in {won} of {len(cases)}" in verdict(cases)
    for name in ("scheduling", "scheduling_measured"):
        assert len(simulated_cases(reports[name]["rows"])) == 5


def test_refusals_are_told() -> None:
    figures = [committed()[name]["figures"] for name in ("chaos", "chaos_minute")]
    shares = [f"{each['refused'] / each['requests']:.2%}" for each in figures]
    for page in (README, ROOT / "docs" / "results" / "benchmarks.md"):
        assert all(share in page.read_text() for share in shares)


def test_one_part_killed_a_minute_costs_few_calls() -> None:
    report = committed()["chaos_minute"]
    figures = report["figures"]
    assert report["settings"]["every"] == 60 and report["settings"]["seconds"] >= 600
    assert figures["refused"] <= 0.01 * figures["requests"]
    assert figures["done"] + figures["refused"] == figures["requests"]
    assert not any(figures[name] for name in ("wrong_tokens", "unanswered", "lost_acknowledged", "leaked"))


def test_every_report_with_a_page_is_on_it() -> None:
    """Each page's tables come from reports that are there."""
    made = {marker: lines(committed()) for marks in TABLES.values() for marker, lines in marks.items()}
    assert not [marker for marker, text in made.items() if "Not measured yet" in text]
