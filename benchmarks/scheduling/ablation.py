"""Ablation of `rank_aware`: the policy with one term off at a time, in simulation, paired over seeds.

Functions and seeds are split in halves: terms are chosen on one, figures are published from the other. `exact`: nodes
take as long as their models say, and clones of a function burst in the same minute. `error`: each node is slower or
faster than its model by a drawn factor, passes vary, and each clone's counts begin at a drawn minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.scheduling.routing_variants import VARIANTS, maker
from garnish.simulation.job import Job, TraceRequest
from garnish.simulation.node import Pace
from garnish.simulation.outcome import summarise
from garnish.simulation.profile import NodeProfile
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import DEFAULT_SLO, Slo, parse_slo
from garnish.simulation.study import make_jobs

NODE_SD, PASS_SD = 0.15, 0.1
LENGTHS = (8, 32, 128)
"""Upper bounds of the groups of answers, in tokens; a last group has longer ones."""
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Half:
    functions: int
    seeds: tuple[int, ...]


HALVES = {"chosen": Half(0, (1, 2, 3)), "published": Half(1, (11, 12, 13, 14, 15))}


@dataclass(frozen=True)
class Case:
    name: str
    shifted: bool
    node_sd: float
    pass_sd: float


CASES = (Case("exact", False, 0.0, 0.0), Case("error", True, NODE_SD, PASS_SD))


def pace(case: Case, seed: int, node: int) -> Pace:
    """A node's factor is normal, and at least a half; a pass's is log-normal with a mean of 1."""
    if not case.node_sd and not case.pass_sd:
        return lambda: 1.0
    rng = np.random.default_rng((seed, 7, node))
    factor = max(0.5, 1.0 + case.node_sd * float(rng.standard_normal()))
    drawn = iter(factor * np.exp(case.pass_sd * rng.standard_normal(200_000) - case.pass_sd**2 / 2))
    return lambda: float(next(drawn, factor))


def ablation_rows(
    place: dict[str, Any],
    profile: NodeProfile,
    nodes: int,
    variants: Sequence[str],
    traces: Callable[[float, Case], Sequence[TraceRequest]],
    loads: Sequence[float],
    seconds: float,
) -> list[dict[str, Any]]:
    """A row per load, case and variant; `place` says what they share, the seed among it."""
    slo, rows = parse_slo(DEFAULT_SLO, profile), []
    for load in loads:
        for case in CASES:
            requests = traces(load, case)
            for variant in variants:
                measured = _run(profile, nodes, variant, requests, slo, partial(pace, case, place["seed"]), seconds)
                rows.append({**place, "load": load, "case": case.name, "variant": variant, **measured})
                print(*rows[-1].values(), file=sys.stderr, flush=True)
    return rows


def _run(
    profile: NodeProfile,
    nodes: int,
    variant: str,
    requests: Sequence[TraceRequest],
    slo: Slo,
    paces: Callable[[int], Pace],
    seconds: float,
) -> dict[str, Any]:
    began = time.perf_counter()
    simulator = Simulator(profile, nodes, maker(variant), make_jobs(requests, profile, slo), paces)
    simulator.run()
    summary, attained = summarise(simulator, slo), _attained(simulator, slo)
    return {
        "requests": summary.requests, "attainment": summary.attainment, "attainable": summary.attainable,
        "goodput": sum(job.end <= seconds for job in attained) / seconds, "mean_tpt_ms": summary.tpt.mean * 1e3,
        "ttft_p50_ms": summary.ttft.p50 * 1e3, "ttft_p99_ms": summary.ttft.p99 * 1e3,
        "cold": 1 - summary.cold_starts.get("none", 0) / max(1, summary.done), "rejected": summary.rejected,
        "utilisation": summary.utilisation, "by_length": _by_length(simulator.jobs, attained),
        "decision_p99_us": float(np.percentile(simulator.decisions, 99)) * 1e6,
        "took_s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def _attained(simulator: Simulator, slo: Slo) -> list[Job]:
    overhead = simulator.profile.overhead
    return [job for job in simulator.jobs if job.outcome == "done" and slo.holds(job, overhead)]


def _by_length(jobs: Sequence[Job], attained: Sequence[Job]) -> dict[str, list[float]]:
    """Returns, by the longest answer of each group, its share of the requests, and its SLO attainment."""
    bounds = (*LENGTHS, 1 << 30)
    of_all = np.bincount(np.searchsorted(bounds, [job.output for job in jobs]), minlength=len(bounds))
    of_kept = np.bincount(np.searchsorted(bounds, [job.output for job in attained]), minlength=len(bounds))
    names = [*(f"{bound}" for bound in LENGTHS), "more"]
    return {
        name: [round(float(value), 4) for value in (total / max(1, len(jobs)), attained_count / max(1, total))]
        for name, total, attained_count in zip(names, of_all, of_kept, strict=True)
    }


def paired(rows: Sequence[dict[str, Any]], measure: str, variant: str, against: str) -> tuple[float, float]:
    """The mean over seeds of the difference, and half its 95 % interval; `rows` of one profile, load and case."""
    ours, theirs = (
        {row["seed"]: row[measure] for row in rows if row["variant"] == name} for name in (variant, against)
    )
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(differences) < 2:
        return mean(differences), float("nan")
    return mean(differences), T_95[len(differences) - 1] * stdev(differences) / sqrt(len(differences))


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`attain_` and `goodput_` of a variant, then the study, profile, load and case: means over seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        place = f"{row['study']}_{row['profile']}_{row['load']:g}_{row['case']}"
        groups.setdefault(f"{row['variant'].replace(' ', '_')}_{place}", []).append(row)
    return {
        f"{short}_{name}": mean(row[measure] for row in each)
        for name, each in groups.items()
        for short, measure in (("attain", "attainment"), ("goodput", "goodput"))
    }


def all_variants() -> list[str]:
    return [*VARIANTS, "toppings"]
