"""Every variant over the same calls of one setting (workloads.py), in rounds that alternate the variants."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.cold_bench import ASSISTED, VARIANTS, Bench
from benchmarks.cold_rig import Rig, Run, capacity
from benchmarks.workloads import Call, Setting, draw_calls

MEAN_OUTPUT = 12
"""Tokens. The papers' answers are longer; a first token does not wait for them."""
MOST_PROMPT = {"chat": 1024, "azure": 2048, "meeting": 7500}
CALLS_SHARE = {"chat": 1.0, "azure": 0.4, "meeting": 0.1}
"""Of the calls of a round: long prompts take so much longer."""
HEADLINE = "S3"
"""Toppings' most demanding setting, whose figures carry no setting in their names."""
KINDS = ("ttft", "tpt", "e2e")
WARMED = ("cached", "cached_all_cores")
LEFT_OUT = {
    HEADLINE: set[str](),
    "S4": {"cached_all_cores", "overlap", "assist_slowed"},  # alone, a request is overlapped with nothing
    "MAF-256-25": {"cached_all_cores", "dlora", "overlap", "pipeline", "assist", "assist_slowed"},
}


def variants_of(setting: Setting, columns: Sequence[str]) -> list[str]:
    """CACHED first: the others are measured by it. Where one call takes half a minute, or the setting differs from
    another in one thing only, the ways that would show nothing new are left out."""
    names = [name for name, variant in VARIANTS.items() if variant.repeats in ("fast", *columns)]
    if "fast" not in columns:
        names = [name for name in names if name not in ASSISTED]
    left_out = LEFT_OUT.get(setting.name, {"cached_all_cores"})
    names = [name for name in names if name not in left_out]
    return [*names, "full_fourfold"] if setting.name == HEADLINE and "slowed" in columns else names


def run_setting(
    bench: Bench, setting: Setting, names: Sequence[str], rounds: int, calls: int, seed: int, until: float
) -> dict[str, Any]:
    """`until`: no round is begun after this time (time.monotonic), but one is always run."""
    rng = np.random.default_rng([seed, *setting.name.encode()])
    count = max(1, round(calls * CALLS_SHARE[setting.lengths]))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    gap, order = 0.0, list(names)
    for index in range(rounds):
        if index and time.monotonic() > until:
            break
        part, residents = draw_round(bench, setting, count, rng)
        prompts = [_tokens(bench.cached, call, rng) for call in part]
        if count > 1:
            warm(bench, prompts, [name for name in WARMED if name in names])
            gap = gap or 1 / (setting.utilisation * capacity(bench.cached, part, prompts))
        for name in order:
            with bench.variant(name) as rig:
                if VARIANTS[name].cold:
                    bench.bring(residents)
                found[name].append(measures(bench, rig.serve(part, prompts, gap)))
        order = order[1:] + order[:1]
    return {"part": setting.name, "gap_s": gap, "calls": count, "rounds": found}


def warm(bench: Bench, prompts: Sequence[list[int]], names: Sequence[str]) -> None:
    """A product of a size that is new to the process takes longer, for each number of threads: not at one way's
    expense."""
    for name in names:
        with bench.variant(name) as rig:
            for prompt in prompts:
                rig.first_tokens(prompt, [0])


def draw_round(
    bench: Bench, setting: Setting, count: int, rng: np.random.Generator, mean_output: int = MEAN_OUTPUT
) -> tuple[list[Call], list[int]]:
    """Calls of the rig's adapters, and those of them that lie on the device at first."""
    most = min(MOST_PROMPT[setting.lengths], bench.cached.engine.base.max_context - 4 * mean_output)
    drawn = draw_calls(setting, count, rng, most, mean_output)
    # adapters of the setting -> adapters of the rig, by rank, in order of their first call
    taken = {rank: iter(indices) for rank, indices in bench.of_rank.items()}
    place: dict[int, int] = {}
    for call in drawn:
        if call.adapter not in place:
            place[call.adapter] = next(taken[setting.ranks[call.adapter % len(setting.ranks)]])
    resident = setting.pool_share * setting.adapters if setting.popularity == "maf" else 0
    calls = [Call(c.at, place[c.adapter], c.prompt_tokens, c.output_tokens) for c in drawn]
    return calls, [at for adapter, at in place.items() if adapter < resident]


def _tokens(rig: Rig, call: Call, rng: np.random.Generator) -> list[int]:
    high = min(1000, rig.engine.base.vocab_size)
    return [int(token) for token in rng.integers(100, high, call.prompt_tokens)]


def measures(bench: Bench, run: Run) -> dict[str, Any]:
    """Means over the calls, seconds; what each call was exposed to; shares of the time."""
    samples, profile = [one.sample for one in run.served], bench.profile
    tpot = [sample.tpot for sample in samples if sample.tpot is not None]
    after = [one for one in (_after_own_load(sample.times) for sample in samples) if one is not None]
    plans: dict[str, int] = {}
    for one in run.served:
        plans[one.cold.plan] = plans.get(one.cold.plan, 0) + 1
    return {
        "ttft": mean(sample.ttft for sample in samples),
        "tpt": mean(sample.tpt for sample in samples),
        "e2e": mean(sample.e2e for sample in samples),
        "tpot": mean(tpot) if tpot else None,
        "others_tpot": mean(after) if after else None,
        "cold": mean(one.cold.state != "none" for one in run.served),
        "plans": plans,
        "exposed_s": [one.cold.exposed for one in run.served],
        "exposed_share": [
            one.cold.exposed / (bench.layers * profile.layer_seconds(one.sample.prompt_tokens)) for one in run.served
        ],
        "cpu_busy": run.workers / run.wall,
        "device_busy": run.device / run.wall,
    }


def _after_own_load(times: Sequence[float]) -> float | None:
    """Seconds between two tokens from the second on. A request decodes once its own adapter is there, so what holds it
    up from then on are the loads and prompts of others. None: there are too few tokens."""
    return (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None


def figures_of(row: dict[str, Any]) -> dict[str, float]:
    """`{measure}_over_cached_{variant}` and what a cold load leaves to be seen; medians over rounds."""
    found: dict[str, float] = {}
    rounds, base = row["rounds"], row["rounds"]["cached"]
    for name, each in rounds.items():
        for kind in KINDS:
            ratios = [one[kind] / ref[kind] for one, ref in zip(each, base, strict=True)]
            found[f"{kind}_over_cached_{name}"] = median(ratios)
            if kind == "ttft":
                found[f"ttft_over_cached_{name}_max"] = max(ratios)
        exposed = [value for one in each for value in one["exposed_s"]]
        found[f"exposed_ms_{name}"] = 1e3 * mean(exposed)
        if name.startswith("full"):
            tail = name.removeprefix("full")
            shares = [value for one in each for value in one["exposed_share"]]
            found[f"exposed_p50_share{tail}"] = float(np.percentile(shares, 50))
            found[f"exposed_p99_ms{tail}"] = 1e3 * float(np.percentile(exposed, 99))
            for figure, kind in ((f"tpot_over_cached_{name}", "tpot"), (f"others_tpot_ratio{tail}", "others_tpot")):
                ratios = [one[kind] / ref[kind] for one, ref in zip(each, base, strict=True) if one[kind] and ref[kind]]
                if ratios:
                    found[figure] = median(ratios)
            for kind in ("cpu_busy", "device_busy"):
                found[f"{kind}{tail}"] = mean(one[kind] for one in each)
    if "full_fourfold" in rounds:
        for kind in KINDS:
            tail = "" if kind == "ttft" else f"_{kind}"
            found[f"full_4x_tokens_per_core{tail}"] = found[f"{kind}_over_cached_full_fourfold"]
    named = {f"{name}_{row['part']}": value for name, value in found.items()}
    return named | found if row["part"] == HEADLINE else named
