"""Cold requests alone: what the pipeline gains (Toppings 7.3), what the planner loses. And how much of a request's time
others' loads take (Toppings 2.3)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.cold_bench import ASSISTED, TOKENS, Bench
from benchmarks.cold_rig import Run, draw_prompt
from benchmarks.cold_settings import MOST_PROMPT, draw_round
from benchmarks.report import rounds_until
from benchmarks.workloads import SETTINGS, UTILISATION_PER_RPS
from node_agent.coldstart.cold_starts import MODES, ColdStartMode

PIPELINING_RANKS = (64, 128)
FORCED = {
    "wait": ColdStartMode(("wait",)),
    "pipeline": ColdStartMode(("pipeline",)),
    "assist": ColdStartMode(("assist",)),
}
GRID = [(tokens, rate, loads) for loads in (1, 3) for rate in (1.0, 4.0) for tokens in (32, 128, 256)]
"""Prompt tokens, times the study's link rate, simultaneous loads."""
QUICK_GRID = [(32, 1.0, 2), (128, 4.0, 1)]
INTERRUPTING_RPS = (3, 6, 9)
"""On a 7B: the rates of Toppings' figure 4."""
INTERRUPTED_OUTPUT = 32
"""Tokens on average: the longer the answers, the more loads interrupt them."""


def pipelining(bench: Bench, columns: Sequence[str], rounds: int, until: float) -> dict[str, Any]:
    """First token of a lone cold prompt of 256 tokens: CPU workers until the whole adapter is there, and FULL."""
    rows: list[dict[str, Any]] = []
    prompt = draw_prompt(bench.cold.engine, TOKENS)
    for rank in PIPELINING_RANKS:
        for column in columns:
            rows.append({"rank": rank, "column": column, "assist": [], "full": []})
    for index in rounds_until(until, rounds + 1, least=2):  # the first warms
        for row in rows:
            for name in ("assist", "full"):
                bench.set_cold(ASSISTED[name], row["column"])
                seconds = _first_token(bench, prompt, bench.of_rank[row["rank"]][:1])
                if index:
                    row[name].append(seconds)
    return {"part": "pipelining", "tokens": TOKENS, "rows": rows}


def pipelining_figures(row: dict[str, Any]) -> dict[str, float]:
    """The speed-up by the pipeline; named after the paper's column alone where both were measured."""
    found: dict[str, float] = {}
    for one in sorted(row["rows"], key=lambda one: one["column"] == "slowed"):
        ratio = median(a / b for a, b in zip(one["assist"], one["full"], strict=True))
        found[f"full_over_assist_r{one['rank']}_{one['column']}"] = ratio
        found[f"full_over_assist_r{one['rank']}"] = ratio
    return found


def regret(
    bench: Bench, columns: Sequence[str], rounds: int, until: float, grid: Sequence[tuple[int, float, int]] = GRID
) -> dict[str, Any]:
    """Mean time to the first token of cold requests that are sent at once: the planner's choice, and each plan forced.

    The best forced plan is the one with the lowest median, known afterwards only."""
    rows: list[dict[str, Any]] = [
        {"tokens": tokens, "rate": rate, "loads": loads, "column": column, **{name: [] for name in ("full", *FORCED)}}
        for tokens, rate, loads in grid
        for column in columns
    ]
    for index in rounds_until(until, rounds):
        for row in rows:
            bench.set_link(row["rate"])
            prompt, adapters = draw_prompt(bench.cold.engine, row["tokens"]), bench.of_rank[64][: row["loads"]]
            ways = [("full", MODES["auto"]), *FORCED.items()]
            for name, way in ways[index % len(ways) :] + ways[: index % len(ways)]:
                bench.set_cold(way, row["column"])
                row[name].append(_first_token(bench, prompt, adapters))
    bench.set_link(1.0)
    return {"part": "regret", "rows": rows}


def regret_figures(row: dict[str, Any]) -> dict[str, float]:
    points = [median(one["full"]) / min(median(one[name]) for name in FORCED) - 1 for one in row["rows"]]
    return {"planner_regret": max(points), "planner_regret_p50": median(points), "planner_regret_points": len(points)}


def _first_token(bench: Bench, prompt: list[int], adapters: Sequence[int]) -> float:
    bench.cold.forget_device()
    return mean(one.sample.ttft for one in bench.cold.first_tokens(prompt, adapters))


def interruptions(bench: Bench, calls: int, rounds: int, seed: int, until: float) -> dict[str, Any]:
    """ONDMD under the popularity of the trace's functions, at three rates: how others' loads hold up a request. As in
    S-LoRA the device begins with no adapter."""
    rng = np.random.default_rng([seed, 2])
    setting = SETTINGS["MAF-512"]
    rows: list[dict[str, Any]] = [{"rps": rps, "share": [], "count": []} for rps in INTERRUPTING_RPS]
    rate = 0.0
    for index in rounds_until(until, rounds):
        part, _ = draw_round(bench, setting, calls, rng, INTERRUPTED_OUTPUT)
        prompts = [draw_prompt(bench.cold.engine, min(call.prompt_tokens, MOST_PROMPT["chat"]), index) for call in part]
        if not rate:
            begin = time.perf_counter()
            bench.cached.serve(part, prompts, 0.0)
            rate = len(part) / (time.perf_counter() - begin)
        for row in rows:
            with bench.variant("ondmd") as rig:
                run = rig.serve(part, prompts, 1 / (rate * row["rps"] * UTILISATION_PER_RPS))
            for share, count in interrupted(run):
                row["share"].append(share)
                row["count"].append(count)
    return {"part": "interruptions", "rows": rows, "mean_output": INTERRUPTED_OUTPUT}


def interrupted(run: Run) -> list[tuple[float, int]]:
    """For each request, between its first token and its end: the share of its whole time in which nothing was computed
    because an adapter was on its way, and how often that was so."""
    found = []
    for one in run.served:
        first, end = one.sample.times[0], one.sample.end
        cuts = [min(end, b) - max(first, a) for a, b in run.stalls if a < end and b > first]
        found.append((sum(cuts) / one.sample.e2e, len(cuts)))
    return found


def interruption_figures(row: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in row["rows"]:
        found[f"interruption_share_{one['rps']}rps"] = mean(one["share"])
        found[f"interruptions_p50_{one['rps']}rps"] = median(one["count"])
    most = max(INTERRUPTING_RPS)
    found["interruption_share"] = found[f"interruption_share_{most}rps"]
    found["interruptions_p50"] = found[f"interruptions_p50_{most}rps"]
    return found
