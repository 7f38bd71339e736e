"""What ranks cost where no call is cold: the load of one adapter (Toppings figure 4, right), and a decode step of rows
whose adapters' ranks are alike or differ (figure 5)."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.cold_bench import Bench
from benchmarks.cold_rig import draw_prompt
from benchmarks.report import rounds_until
from benchmarks.workloads import SETTINGS, Call
from node_agent.coldstart.cold_starts import MODES

RANKS = (*SETTINGS["MIX"].ranks, 256)
ROWS = 6
"""Of a batch. Each has an adapter of its own."""
BATCHES: dict[str, tuple[int, ...]] = {
    **{f"rank {rank}": (rank,) * ROWS for rank in (8, 64, 128)},
    "ranks 8 and 128": (8, 128) * (ROWS // 2),
    "ranks 8 to 128": (8, 16, 32, 64, 128, 128),
}
PROMPT, ANSWER = 16, 24
"""Tokens."""


def ranks(bench: Bench, rounds: int, until: float) -> dict[str, Any]:
    loads: list[dict[str, Any]] = [{"rank": rank, "bytes": bench.bytes_of(rank), "load_s": []} for rank in RANKS]
    steps: list[dict[str, Any]] = [{"batch": name, "step_s": []} for name in BATCHES]
    prompt = draw_prompt(bench.cached.engine, PROMPT)
    bench.set_cold(MODES["wait"], "fast")
    for _ in rounds_until(until, rounds):
        for row in loads:
            bench.cold.forget_device()
            begin = time.perf_counter()
            bench.cold.fill_device(bench.of_rank[row["rank"]][:1])
            row["load_s"].append(time.perf_counter() - begin)
        for row in steps:
            row["step_s"].append(_step_seconds(bench, prompt, BATCHES[row["batch"]]))
    return {"part": "ranks", "loads": loads, "steps": steps, "rows_of_batch": ROWS}


def _step_seconds(bench: Bench, prompt: list[int], of_rows: tuple[int, ...]) -> float:
    """The step in the middle, of those in which all rows decode."""
    free = {rank: iter(bench.of_rank[rank]) for rank in set(of_rows)}
    calls = [Call(0.0, next(free[rank]), PROMPT, ANSWER) for rank in of_rows]
    run = bench.cached.serve(calls, [prompt] * len(calls), 0.0)
    times = sorted(run.served[-1].sample.times)
    return median(after - before for before, after in pairwise(times[1:]))


def ranks_figures(row: dict[str, Any]) -> dict[str, float]:
    found = {f"load_ms_r{one['rank']}": 1e3 * median(one["load_s"]) for one in row["loads"]}
    found |= {f"step_ms_{one['batch'].replace(' ', '_')}": 1e3 * median(one["step_s"]) for one in row["steps"]}
    return found
