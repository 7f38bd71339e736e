"""The cold-start planner's first choices, replayed without a GPU: it learns from one committed report of a GPU and is
judged on the other.

Each link rate is a separate node. Its planner knows ROUNDS lone passes of each kind of call and plan, drawn around
the times of one report, and chooses once for each kind of the other report, whose times, drawn likewise, say what each
plan would have taken. How far draws lie from a report is how far both reports lie apart, plan by plan. A point's regret
is the chosen plan's time over the best plan's, less one: the median over all draws. Bursts were never measured: the
first call's choice is judged by the burst's times under that plan. Kinds that the first report lacks are measured by no
node; they stand apart. Learning is replayed with fixed costs (benchmarks/gpu/replay_learning.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.report import arguments, load, publish, report
from benchmarks.gpu.replay_learning import COSTS, learning_rows
from benchmarks.gpu.replayed_node import PLANS, Call, ReplayedNode, profile_at
from node_agent.coldstart.pass_times import ROUNDS, PassSample

REPORTS = ("gpu_suite", "gpu_suite_cold")
MEASURED = {"wait": "overlap_ms", "pipeline": "pipeline_ms", "assist": "assist_pipeline_ms"}
DRAWS, QUICK_DRAWS = 200, 5
CHOOSERS = ("planner", "pipeline", "wait")
"""The planner, and one plan for everything."""
LACKING = {
    "link rates, GB/s": [2, 8, 16],
    "bursts": "at 1, 2, 8 and 16 GB/s; of ranks but 64; of lengths but 256; of 2 calls; of 8 and 32 in gpu_suite",
    "at 4 GB/s": "2,048 tokens, but for rank 64 in gpu_suite_cold; 512 tokens in gpu_suite, but for rank 64",
    "assisted layers": "how many; weights were not split among workers yet, and handoffs crossed a slow link for free",
}
"""Points that the GPU reports don't have, and what they don't say; first on a GPU."""


@dataclass(frozen=True)
class Point:
    rate: float | None
    """link rate in GB/s; None: the slot's full rate"""
    call: Call


Times = Mapping[Point, np.ndarray]
"""Seconds by plan, in the order of PLANS."""


def times_of(document: dict[str, Any]) -> dict[Point, np.ndarray]:
    """Returns the seconds of each point of a GPU report, by plan."""
    return {
        Point(row["gb_s"], Call(row["rank"], row["tokens"], row["loads"])): np.array(
            [row[MEASURED[plan]] / 1e3 for plan in PLANS]
        )
        for row in document["rows"]
        if "cached_ms" in row
    }


def spread_of(first: Times, second: Times) -> np.ndarray:
    """Returns the standard deviation, by plan, of the logarithm of one report's times around what both have in common:
    half of the variance of their difference."""
    apart = np.array([np.log(first[point] / second[point]) for point in first if point in second])
    deviation: np.ndarray = np.sqrt((apart**2).mean(axis=0) / 2)
    return deviation


def drawn(rng: np.random.Generator, seconds: np.ndarray, spread: np.ndarray, count: int) -> np.ndarray:
    """Returns f64[count, plans]: times around these."""
    times: np.ndarray = seconds * np.exp(spread * rng.standard_normal((count, len(seconds))))
    return times


def regret(seconds: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns f64[draws]: what each draw's chosen plan takes over the best one, less one. `seconds`: f64[draws, plans];
    `chosen`: i64[draws], indices of plans."""
    chosen_s = np.take_along_axis(seconds, chosen[:, None], axis=1)[:, 0]
    lost: np.ndarray = chosen_s / seconds.min(axis=1) - 1
    return lost


def choices(
    node: ReplayedNode, measured_calls: Mapping[Call, np.ndarray], calls: Sequence[Call], spread: np.ndarray,
    draws: int, rng: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """Returns i64[draws, calls]: the plan that the node chooses first for each of the calls. In each draw it has
    measured ROUNDS passes of each of the `measured_calls` and plans, and nothing else."""
    forecasts = {call: [node.forecast(call, plan) for plan in PLANS] for call in measured_calls}
    plans = np.empty((draws, len(calls)), int)
    for draw in range(draws):
        samples = [
            PassSample(node.kind(call), plan, forecasts[call][i], float(measured[i]))
            for call, seconds in measured_calls.items()
            for measured in drawn(rng, seconds, spread, ROUNDS)
            for i, plan in enumerate(PLANS)
        ]
        node.learn(samples)
        plans[draw] = [PLANS.index(node.plan(call).name) for call in calls]
    return plans


def judged_rows(
    profile: dict[str, Any], workers: int, names: tuple[str, str], times: tuple[Times, Times], spread: np.ndarray,
    draws: int, rng: np.random.Generator,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns a row for each point of the second report, judged after measurements drawn from the first."""
    fit, judge = times
    rows = []
    for rate in dict.fromkeys(point.rate for point in judge):
        node = ReplayedNode(profile_at(profile, rate), workers)
        measured_calls = {p.call: seconds for p, seconds in fit.items() if p.rate == rate and p.call.loads == 1}
        points = [point for point in judge if point.rate == rate]
        chosen = choices(node, measured_calls, [point.call for point in points], spread, draws, rng)
        for at, point in enumerate(points):
            row = {
                "part": "unmeasured" if point.call.loads == 1 and point.call not in measured_calls else "choices",
                "fitted": names[0], "judged": names[1], "gb_s": rate, "loads": point.call.loads,
                "rank": point.call.rank, "tokens": point.call.tokens,
            }  # fmt: skip
            rows.append(row | judged(drawn(rng, judge[point], spread, draws), chosen[:, at]))
    return rows


def judged(seconds: np.ndarray, chosen: np.ndarray) -> dict[str, Any]:
    """Returns how often each plan was chosen, and the regret of the planner and of each plain plan."""
    by_chooser = {
        "planner": chosen,
        **{plan: np.full(len(chosen), PLANS.index(plan)) for plan in CHOOSERS if plan in PLANS},
    }
    columns: dict[str, Any] = {f"chose_{plan}": round(float((chosen == i).mean()), 3) for i, plan in enumerate(PLANS)}
    for name, plans in by_chooser.items():
        each = regret(seconds, plans)
        columns |= {
            f"{name}_regret": round(float(np.median(each)), 4),
            f"{name}_regret_mean": round(float(each.mean()), 4),
            f"{name}_regret_single_draw": round(float(each.max()), 4),
        }
    return columns


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns quantiles over points of their regret, which is the median over draws. The planner's have no prefix,
    those of both directions no suffix. `..._mean_...` is of points' means over draws, `..._single_draw` the worst draw
    of any point; `unmeasured_...` is of kinds that no node had measured.
    """
    points = [row for row in rows if row["part"] == "choices"]
    missed = [row for row in rows if row["part"] == "unmeasured"]
    figures = {}
    for name in CHOOSERS:
        prefix, column = "" if name == "planner" else f"{name}_", f"{name}_regret"
        for judge in ("", *REPORTS):
            each = [row[column] for row in points if judge in ("", row["judged"])]
            for quantity, at in (("p50", 0.5), ("p90", 0.9), ("worst", 1.0)):
                figures[f"{prefix}regret_{quantity}{judge and '_judged_by_'}{judge}"] = float(np.quantile(each, at))
        means = [row[f"{column}_mean"] for row in points]
        figures |= {
            f"{prefix}regret_mean_p90": float(np.quantile(means, 0.9)),
            f"{prefix}regret_mean_worst": max(means),
        }
        figures[f"{prefix}regret_worst_single_draw"] = max(row[f"{column}_single_draw"] for row in points)
        figures[f"{prefix}unmeasured_regret_worst"] = max(row[column] for row in missed)
    for row in rows:
        if row["part"] == "learning":
            rate = "own" if row["gb_s"] is None else f"{row['gb_s']:g}"
            where = f"gbs{rate}_workers{row['workers']}"
            figures |= {f"{name}_{where}": row[name] for name in ("learning_regret", "learnt_regret")}
    return figures


def study(quick: bool, seed: int, draws: int | None = None) -> dict[str, Any]:
    documents = [load(name) for name in REPORTS]
    (profile,) = (row["profile"] for row in documents[0]["rows"] if "profile" in row)
    workers = profile["key"]["workers"]
    one, second = (times_of(document) for document in documents)
    spread, rng = spread_of(one, second), np.random.default_rng(seed)
    draws = draws or (QUICK_DRAWS if quick else DRAWS)
    rows = judged_rows(profile, workers, REPORTS, (one, second), spread, draws, rng)
    rows += judged_rows(profile, workers, REPORTS[::-1], (second, one), spread, draws, rng)
    rows += learning_rows(profile, workers, quick, seed)
    settings = {
        "reports": {name: document["commit"] for name, document in zip(REPORTS, documents, strict=True)},
        "gpu": documents[0]["machine"]["gpu"], "draws": draws, "rounds": ROUNDS, "workers": workers,
        "log_spread": dict(zip(PLANS, spread.round(4).tolist(), strict=True)), "learning_costs": COSTS,
        "lacking": LACKING,
    }  # fmt: skip
    return report("plan_replay", settings, seed, rows, figures_of(rows), simulated=True)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    publish(study(options.quick, options.seed), options.json)


if __name__ == "__main__":
    main()
