"""The replayed planner within its bounds on both reports, and its regret against a count of every plan by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.report import RESULTS, load
from benchmarks.gpu.plan_replay import REPORTS, Point, choices, judged, judged_rows, regret, spread_of, study, times_of
from benchmarks.gpu.replay_learning import KINDS, LearningNode, regrets
from benchmarks.gpu.replayed_node import PLANS, Call, ReplayedNode, profile_at
from node_agent.coldstart.costs import pipelined_costs
from tests.benchmarks.studies import run_study

P90, WORST = 0.08, 0.3
LEARNT = 0.02
COLUMNS = ("overlap_ms", "pipeline_ms", "assist_pipeline_ms")
"""of PLANS"""


def the_profile() -> dict[str, Any]:
    found: dict[str, Any] = next(row["profile"] for row in load(REPORTS[0])["rows"] if "profile" in row)
    return found


def check_bounds(figures: dict[str, float]) -> None:
    for direction in ("", *(f"_judged_by_{name}" for name in REPORTS)):
        assert figures[f"regret_p90{direction}"] < P90
        assert figures[f"regret_worst{direction}"] < WORST
    assert figures["regret_p90"] < figures["pipeline_regret_p90"] and figures["regret_p90"] < figures["wait_regret_p90"]


@pytest.fixture(scope="module")
def replayed() -> dict[str, Any]:
    return study(quick=True, seed=1, draws=5)


def test_first_choices_lose_little(replayed: dict[str, Any]) -> None:
    check_bounds(replayed["figures"])
    points = {(row["judged"], row["gb_s"], row["rank"], row["tokens"], row["loads"]) for row in replayed["rows"]
              if row["part"] in ("choices", "unmeasured")}  # fmt: skip
    expected = {(name, row["gb_s"], row["rank"], row["tokens"], row["loads"]) for name in REPORTS
                for row in load(name)["rows"] if "cached_ms" in row}  # fmt: skip
    assert points == expected, "no point is left out"
    assert {row["loads"] for row in replayed["rows"] if row["part"] == "unmeasured"} == {1}


def test_no_kind_is_assisted_unmeasured(replayed: dict[str, Any]) -> None:
    for row in replayed["rows"]:
        assert row["part"] != "unmeasured" or row["chose_assist"] == 0
        assert row["part"] != "learning" or row["assisted_unmeasured"] == 0
    assert any(row.get("chose_assist", 0) > 0.5 for row in replayed["rows"]), "others are assisted"


def test_learning_ends_regret(replayed: dict[str, Any]) -> None:
    rows = {(row["gb_s"], row["workers"]): row for row in replayed["rows"] if row["part"] == "learning"}
    assert all(row["learnt_regret"] < LEARNT for row in rows.values())
    slow = rows[1.0, 14]
    assert slow["learning_regret"] > 5 * LEARNT, "there was something to learn"
    assert slow["regret_by_call"][-1] < slow["regret_by_call"][0] / 2


def test_the_committed_report_is_within_the_bounds() -> None:
    committed = json.loads((RESULTS / "plan_replay.json").read_text())
    check_bounds(committed["figures"])
    assert committed["figures"]["regret_mean_p90"] < P90 and committed["figures"]["regret_mean_worst"] < WORST
    assert all(value < LEARNT for name, value in committed["figures"].items() if name.startswith("learnt_regret"))
    assert committed["settings"]["reports"] == {name: load(name)["commit"] for name in REPORTS}


@given(st.lists(st.tuples(*[st.floats(0.001, 10)] * 3, st.integers(0, 2)), min_size=1, max_size=9))
def test_regret_is_what_every_plan_tried_says(draws: list[tuple[float, float, float, int]]) -> None:
    seconds, chosen = np.array([draw[:3] for draw in draws]), np.array([draw[3] for draw in draws])
    by_hand = []
    for *times, plan in draws:
        best = times[0]
        for each in times[1:]:
            best = each if each < best else best
        by_hand.append((times[int(plan)] - best) / best)
    np.testing.assert_allclose(regret(seconds, chosen), by_hand, atol=1e-12)
    found, middle = judged(seconds, chosen), sorted(by_hand)
    half = len(middle) // 2
    expected = middle[half] if len(middle) % 2 else (middle[half - 1] + middle[half]) / 2
    assert found["planner_regret"] == pytest.approx(expected, abs=1e-4)
    assert found["planner_regret_single_draw"] == pytest.approx(middle[-1], abs=1e-4)
    pipelines = [times[1] / min(times) - 1 for *times, _ in draws]
    assert found["pipeline_regret_single_draw"] == pytest.approx(max(pipelines), abs=1e-4)
    assert sum(found[f"chose_{plan}"] for plan in PLANS) == pytest.approx(1, abs=0.002)


def test_without_spread_a_point_is_judged_by_its_row() -> None:
    """Every regret again from the report's own columns, by the plan that the row says was chosen."""
    documents = [load(name) for name in REPORTS]
    fit, judge = (times_of(document) for document in documents)
    rows = judged_rows(the_profile(), 14, REPORTS, (fit, judge), np.zeros(3), 1, np.random.default_rng(0))
    by_point = {(r["gb_s"], r["rank"], r["tokens"], r["loads"]): r for r in documents[1]["rows"] if "cached_ms" in r}
    assert len(rows) == len(by_point)
    for row in rows:
        (chosen,) = [column for plan, column in zip(PLANS, COLUMNS, strict=True) if row[f"chose_{plan}"]]
        of = by_point[row["gb_s"], row["rank"], row["tokens"], row["loads"]]
        assert row["planner_regret"] == pytest.approx(of[chosen] / min(of[c] for c in COLUMNS) - 1, abs=1e-4)


def test_a_perfect_table_is_followed() -> None:
    """Where one plan is clearly the best in what was measured, it is chosen."""
    node, rng = ReplayedNode(profile_at(the_profile(), 1.0), 14), np.random.default_rng(0)
    calls = [Call(256, 64), Call(128, 64)]
    for best in range(len(PLANS)):
        seconds = np.full(3, 0.4)
        seconds[best] = 0.1
        known = dict.fromkeys(calls, seconds)
        assert (choices(node, known, calls, np.zeros(3), 1, rng) == best).all()


def test_the_spread_is_that_of_drawn_reports() -> None:
    rng, true = np.random.default_rng(0), np.array([0.05, 0.1, 0.3])
    points = [Point(1.0, Call(rank, 64)) for rank in range(1, 2001)]
    one, other = ({p: np.exp(rng.normal(0, true)) for p in points} for _ in range(2))
    np.testing.assert_allclose(spread_of(one, other), true, rtol=0.1)


def test_forecasts_are_those_of_a_pipeline_by_hand() -> None:
    """32 layers of rank 64 on q, k, v: A and B of 64 x 4096 in bf16 each, loaded in order, computed as they come."""
    profile = profile_at(the_profile(), 4.0)
    node, call = ReplayedNode(profile, 14), Call(64, 256)
    size = 3 * 2 * 64 * 4096 * 2
    layer = dict(profile.layer)[256]
    link = done = profile.link.latency
    for _ in range(32):
        link += size / 4e9
        done = max(done, link) + layer
    assert node.forecast(call, "pipeline") == pytest.approx(done, rel=1e-3)
    assert node.forecast(call, "wait") == pytest.approx(link + 32 * layer, rel=1e-3)
    costs = pipelined_costs(profile, node.store.layout(call.lease), 256, loads=8)
    assert sum(node.plan(Call(64, 256, 16)).load) == pytest.approx(costs.load.sum()), "8 of a burst load at once"


def test_a_node_without_workers_learns_its_plain_plans() -> None:
    node = LearningNode(ReplayedNode(profile_at(the_profile(), None), 0))
    found, measured_at = regrets(node, 60, np.random.default_rng(2))
    assert measured_at == 0 and not node.node.starts.unmeasured
    assert np.mean(found) < LEARNT and len({sample.kind for sample in node.node.starts.times.samples}) <= len(KINDS)


def test_the_study_writes_a_whole_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    monkeypatch.setattr("benchmarks.gpu.plan_replay.QUICK_DRAWS", 1)
    run_study(monkeypatch, "gpu.plan_replay", "--quick", "--seed", "3", "--json", str(file))
    document = json.loads(file.read_text())
    assert (document["study"], document["seed"], document["simulated"]) == ("plan_replay", 3, True)
    assert {row["part"] for row in document["rows"]} == {"choices", "unmeasured", "learning"}
    assert document["settings"]["lacking"]
