"""Every variant over the same calls of one setting (workloads.py), in rounds that alternate the variants."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.cold_bench import ASSISTED, VARIANTS, Bench
from benchmarks.cold_rig import Run, Served, capacity
from benchmarks.report import rounds_until
from benchmarks.workloads import Call, Setting, draw_calls, meeting_text, most_output

MEAN_OUTPUT = 12
"""Tokens. The papers' answers are longer (S3-long has such); a first token does not wait for them."""
MOST_PROMPT = {"chat": 1024, "azure": 2048, "meeting": 7500}
CALLS_SHARE = {"chat": 1.0, "azure": 0.4, "meeting": 0.1}
"""Of the calls of a round: long prompts take so much longer."""
HEADLINE = "S3"
"""Toppings' most demanding setting, whose figures carry no setting in their names."""
KINDS = ("ttft", "tpt", "e2e")
OF_CALLS = ("ttft", "tpt", "tpot", "e2e", "others_tpot", "prefill", "step")
"""What is kept of each call, seconds: as in benchmarks/latency.py; others_tpot: see `_after_own_load`; prefill: from
its admission to its first token; step: the middle one between two tokens."""
WARMED = ("cached", "cached_all_cores", "set_adapter")
WHOLE = (HEADLINE, "S1", "MAF-256", "MIX")
"""Settings in which every way is run."""
FEW = ("cached", "ondmd", "full", "full_slowed")
"""The ways of other settings."""
ONLY = {
    "S3-azure": ("cached", "pipeline", "full"),
    "S3-long": ("cached", "pipeline", "full", "full_slowed"),
    "S4": ("cached", "ondmd", "full"),
}
"""Settings of which one call takes half a minute, or a round more than one: the ways of these alone."""


def variants_of(setting: Setting, columns: Sequence[str]) -> list[str]:
    """CACHED first: the others are measured by it."""
    names = [name for name, variant in VARIANTS.items() if variant.repeats in ("fast", *columns)]
    if "fast" not in columns:
        names = [name for name in names if name not in ASSISTED]
    if setting.name not in WHOLE:
        return [name for name in names if name in ONLY.get(setting.name, FEW)]
    if setting.name != HEADLINE:
        return [name for name in names if name != "cached_all_cores"]
    return [*names, "full_fourfold"] if "slowed" in columns else names


def run_setting(
    bench: Bench, setting: Setting, names: Sequence[str], rounds: int, calls: int, seed: int, until: float
) -> dict[str, Any]:
    """`until`: no round is begun after this time (time.monotonic), but one is always run."""
    rng = np.random.default_rng([seed, *setting.name.encode()])
    count = max(1, round(calls * CALLS_SHARE[setting.lengths]))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    gap, order = 0.0, list(names)
    for _ in rounds_until(until, rounds):
        part, residents = draw_round(bench, setting, count, rng)
        prompts = [_tokens(bench, setting, call, rng) for call in part]
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
    room = bench.cached.engine.base.max_context - most_output(setting, mean_output)
    most = min(MOST_PROMPT[setting.lengths], room)
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


def _tokens(bench: Bench, setting: Setting, call: Call, rng: np.random.Generator) -> list[int]:
    if setting.lengths == "meeting":
        tokenizer = Tokenizer.from_file(str(bench.model / "tokenizer.json"))
        meeting: list[int] = tokenizer.encode(meeting_text()).ids[: call.prompt_tokens]
        return meeting
    high = min(1000, bench.cached.engine.base.vocab_size)
    return [int(token) for token in rng.integers(100, high, call.prompt_tokens)]


def measures(bench: Bench, run: Run) -> dict[str, Any]:
    """What each call saw and was exposed to, seconds; means over the calls; shares of the time."""
    profile = bench.profile
    of_calls = {kind: [value for one in run.served if (value := _of_call(one, kind)) is not None] for kind in OF_CALLS}
    plans: dict[str, int] = {}
    for one in run.served:
        plans[one.cold.plan] = plans.get(one.cold.plan, 0) + 1
    return {
        **{kind: mean(values) if values else None for kind, values in of_calls.items()},
        "calls": {kind: [round(value, 5) for value in values] for kind, values in of_calls.items()},
        "cold": mean(one.cold.state != "none" for one in run.served),
        "plans": plans,
        "exposed_s": [one.cold.exposed for one in run.served],
        "exposed_share": [
            one.cold.exposed / (bench.layers * profile.layer_seconds(one.sample.prompt_tokens)) for one in run.served
        ],
        "cpu_busy": run.workers / run.wall,
        "device_busy": run.device / run.wall,
    }


def _of_call(one: Served, kind: str) -> float | None:
    """None: the call has too few tokens for it."""
    if kind == "others_tpot":
        return _after_own_load(one.sample.times)
    if kind == "prefill":
        return one.prefill
    if kind == "step":
        times = one.sample.times
        return median(after - before for before, after in pairwise(times)) if len(times) > 1 else None
    found: float | None = getattr(one.sample, kind)
    return found


def _after_own_load(times: Sequence[float]) -> float | None:
    """Seconds between two tokens from the second on. A request decodes once its own adapter is there, so what holds it
    up from then on are the loads and prompts of others. None: there are too few tokens."""
    return (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None


def over_cached_share(row: dict[str, Any], name: str, kind: str, share: float) -> float | None:
    """A percentile of a variant's calls, of all rounds together, over CACHED's; None where none has such a time."""
    found = [[value for one in row["rounds"][of] for value in one["calls"][kind]] for of in (name, "cached")]
    return float(np.percentile(found[0], share) / np.percentile(found[1], share)) if all(found) else None


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
            for share in (50, 95):
                for kind in (*KINDS, "others_tpot"):
                    ratio = over_cached_share(row, name, kind, share)
                    if ratio is not None:
                        found[f"{kind}_p{share}_over_cached_{name}"] = ratio
    if "full_fourfold" in rounds:
        for kind in KINDS:
            tail = "" if kind == "ttft" else f"_{kind}"
            found[f"full_4x_tokens_per_core{tail}"] = found[f"{kind}_over_cached_full_fourfold"]
    named = {f"{name}_{row['part']}": value for name, value in found.items()}
    return named | found if row["part"] == HEADLINE else named
