"""Routing policies on SIM-60 (simulated) and TESTBED-8 (model-timed nodes, the real gateway).

SIM-60: 60 simulated nodes, 40,000 functions with the popularity of the MAF sample's (each is given the counts of one
drawn from it), 340 requests/s on the papers' node, and shares of them. TESTBED-8: eight nodes timed by the same model
in real time, each a process, behind a gateway process, called over HTTP by Poisson arrivals at shares of their
capacity. Each with the papers' constants and with profiles that we measured; there rates are scaled to the same
utilisation.

SLO: 1.5 x the TPT of the base without adapters (garnish.simulation.slo). `oracle_gap`: mean TPT of rank_aware over that
of the oracle, less 1, on a shorter piece of the trace, for the oracle is slow.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adapters.base_model import load_base_model
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, publish, report
from benchmarks.common.trace import FILE as MAF
from benchmarks.scheduling.ablation import HALVES, Case, ablation_rows, all_variants
from benchmarks.scheduling.ablation import figures_of as ablation_figures
from benchmarks.scheduling.testbed import NODES, bed, play, registry_of
from cluster.text import BaseText
from garnish.simulation.job import TraceRequest
from garnish.simulation.profile import NodeProfile, load_profile, profile_names
from garnish.simulation.slo import DEFAULT_SLO, base_tpt, parse_slo
from garnish.simulation.study import simulate
from garnish.simulation.traces.read import read_trace
from garnish.simulation.traces.requests import TraceOptions, chat_prompts, outputs, rank_of, zipf

POLICIES = ("rank_aware", "toppings", "first_fit", "random", "most_idle", "dlora")
SIM_NODES, SIM_RATE, SIM_FUNCTIONS = 60, 340.0, 40_000
RANKS = (8, 16, 32, 64)
MEAN_PROMPT, MEAN_OUTPUT = 115, 96
FULL = {
    "sim_nodes": SIM_NODES, "sim_loads": [1.0, 0.9, 0.75, 0.6], "sim_seconds": 600.0,
    "oracle_seconds": 30.0, "functions": SIM_FUNCTIONS, "ablate_loads": [1.0, 0.75],
    "ablate_seeds": 5, "ablate_bed_seconds": 120.0,
    "sim_policies": list(POLICIES), "bed_policies": list(POLICIES), "bed_loads": [0.6, 0.8, 1.0],
    "bed_seconds": 30.0, "bed_functions": 64, "bed_longest": 256, "bed_nodes": NODES,
}  # fmt: skip
QUICK = {
    "sim_nodes": 6, "sim_loads": [1.0, 0.6], "sim_seconds": 8.0,
    "oracle_seconds": 4.0, "functions": 400, "ablate_loads": [1.0],
    "ablate_seeds": 1, "ablate_bed_seconds": 2.0,
    "sim_policies": list(POLICIES), "bed_policies": ["rank_aware", "dlora"], "bed_loads": [0.6],
    "bed_seconds": 2.0, "bed_functions": 8, "bed_longest": 30, "bed_nodes": 2,
}  # fmt: skip
SCREEN = {"bed_loads": [0.8, 1.0], "ablate_bed_seconds": 60.0}


def work(profile: NodeProfile) -> float:
    """Seconds that a mean request takes of a node whose rows are full."""
    model, rows = profile.performance, profile.max_rows
    ranks = {"max_rank": rows * max(RANKS), "request_ranks": rows * sum(RANKS) // len(RANKS)}
    contexts = rows * (MEAN_PROMPT + MEAN_OUTPUT // 2)
    term = ranks.get(model.decode.rank_term, ranks["request_ranks"])
    prefill = model.prefill.seconds(MEAN_PROMPT, MEAN_PROMPT**2, MEAN_PROMPT * sum(RANKS) // len(RANKS))
    return prefill + MEAN_OUTPUT * model.decode.seconds(rows, contexts, term) / rows


def sim_rows(name: str, profile: NodeProfile, settings: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Returns a row per policy and load.

    At full load, also rows without the ten functions that are called most, and the oracle on a piece of the trace.
    """
    full_rate = SIM_RATE * work(load_profile("papers")) / work(profile) * settings["sim_nodes"] / SIM_NODES
    rows = []
    for load, skip in [(1.0, 10), *((load, 0) for load in settings["sim_loads"])]:
        laws = TraceOptions(
            seed, RANKS, settings["functions"], full_rate * load, settings["sim_seconds"], MEAN_OUTPUT, skip
        )
        requests = read_trace(MAF, laws)[1]
        study = {"study": "sim60", "profile": name, "load": load, "rate": full_rate * load, "without_top": skip}
        for policy in settings["sim_policies"]:
            rows.append(
                {**study, "piece": "whole", **_simulated(profile, settings["sim_nodes"], policy, requests, seed)}
            )
        if load == 1.0 and not skip:
            short = [request for request in requests if request.at < settings["oracle_seconds"]]
            for policy in ("rank_aware", "oracle"):
                rows.append(
                    {**study, "piece": "short", **_simulated(profile, settings["sim_nodes"], policy, short, seed)}
                )
    return rows


def _simulated(
    profile: NodeProfile, nodes: int, policy: str, requests: list[TraceRequest], seed: int
) -> dict[str, Any]:
    began = time.perf_counter()
    simulator, summary = simulate(requests, profile, nodes, policy, parse_slo(DEFAULT_SLO, profile), seed)
    columns = msgspec.to_builtins(summary)
    return {
        "policy": policy, "took_s": round(time.perf_counter() - began, 1),
        "decision_p50_us": float(np.percentile(simulator.decisions, 50)) * 1e6,
        "decision_p99_us": float(np.percentile(simulator.decisions, 99)) * 1e6, **columns,
    }  # fmt: skip


def bed_rows(
    name: str, profile: NodeProfile, model_dir: Path, settings: dict[str, Any], seed: int
) -> list[dict[str, Any]]:
    rng, count = np.random.default_rng(seed), settings["bed_functions"]
    functions = bed_functions(seed, count)
    context = load_base_model(model_dir, model_dir.name).max_context
    words = _words_per_token(model_dir)
    slo, rows = 1.5 * base_tpt(profile), []
    cached = msgspec.structs.replace(profile, adapter_memory=None, host_memory=None)
    with tempfile.TemporaryDirectory() as root:
        registry, key = registry_of(model_dir, functions, slo, Path(root))
        for load in settings["bed_loads"]:
            rate = load * settings["bed_nodes"] / work(profile)
            requests = poisson_trace(rate, settings, functions, context, rng)
            for policy in settings["bed_policies"]:
                folder = Path(root) / f"{policy}-{load}"
                with bed(model_dir, registry, key, cached, policy, folder, settings["bed_nodes"]) as testbed:
                    samples = asyncio.run(play(testbed, requests, words, stream=False))
                good = [sample for sample in samples if not sample.error]
                tpt = [sample.tpt for sample in good]
                rows.append({
                    "study": "testbed8", "profile": name, "policy": policy, "load": load, "rate": rate,
                    "requests": len(samples), "errors": len(samples) - len(good), "slo_ms": slo * 1e3,
                    "attainment": sum(value <= slo for value in tpt) / max(1, len(samples)),
                    "mean_tpt_ms": float(np.mean(tpt)) * 1e3 if tpt else 0.0,
                    "ttft_p50_ms": float(np.median([sample.ttft for sample in good])) * 1e3 if good else 0.0,
                    "late_max_ms": max(sample.late or 0.0 for sample in samples) * 1e3,
                })  # fmt: skip
    return rows


def bed_functions(seed: int, count: int) -> dict[str, int]:
    """Names and ranks."""
    return {f"f{i}": int(rank) for i, rank in enumerate(rank_of(TraceOptions(seed, RANKS), count))}


def poisson_trace(
    rate: float, settings: dict[str, Any], functions: dict[str, int], context: int, rng: np.random.Generator
) -> list[TraceRequest]:
    """Prompts and answers are cut so that both, with `max_tokens`, fit the context."""
    times = np.cumsum(rng.exponential(1 / rate, max(2, int(rate * settings["bed_seconds"]))))
    names, n = list(functions), len(times)
    prompts = np.minimum(chat_prompts(n, rng), max(1, context - 300))
    called = zipf(n, len(names), rng)
    answers = np.minimum(outputs(n, MEAN_OUTPUT, rng), settings["bed_longest"])
    return [
        TraceRequest(float(at), names[f], functions[names[f]], int(prompt), int(answer))
        for at, f, prompt, answer in zip(times, called, prompts, answers, strict=True)
    ]


def _words_per_token(model_dir: Path) -> float:
    return 100 / len(BaseText(model_dir).encode_prompt("the " * 100))


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Names end in `_sim60_PROFILE`, followed by `_LOAD` unless it is whole, or `_testbed8_PROFILE_LOAD`."""
    figures: dict[str, float] = {}
    for row in rows:
        if row["study"] == "testbed8":
            end = f"{row['policy']}_testbed8_{row['profile']}_{row['load']:g}"
            figures |= {f"attain_{end}": row["attainment"], f"mean_tpt_{end}": row["mean_tpt_ms"]}
            continue
        end = f"{row['policy']}_sim60_{row['profile']}"
        if row["piece"] == "short":
            figures[f"short_mean_tpt_{end}"] = row["tpt"]["mean"] * 1e3
        else:
            end += f"_without{row['without_top']}" if row["without_top"] else ""
            end += f"_{row['load']:g}" if row["load"] != 1.0 else ""
            figures |= {f"attain_{end}": row["attainment"], f"mean_tpt_{end}": row["tpt"]["mean"] * 1e3}
            figures[f"decision_p99_us_{end}"] = row["decision_p99_us"]
    for profile in {row["profile"] for row in rows if row["study"] == "sim60"}:
        ours, best = (figures[f"short_mean_tpt_{policy}_sim60_{profile}"] for policy in ("rank_aware", "oracle"))
        figures[f"oracle_gap_{profile}"] = ours / best - 1
    return figures


def ablate(profiles: list[str], half: str, variants: list[str], settings: dict[str, Any], file: Path | None) -> None:
    """Runs the ablation, and writes the report after each seed, as all of them take long."""
    probe, rows = ContentionProbe(), []
    for seed in HALVES[half].seeds[: settings["ablate_seeds"]]:
        for name in profiles:
            place = {"half": half, "profile": name, "seed": seed}
            rows += _ablate_sim(place, load_profile(name), variants, settings)
            rows += _ablate_bed(place, load_profile(name), variants, settings)
        settings |= {"half": half, "slo": DEFAULT_SLO, **probe.values()}
        document = report("routing_ablation", settings, 0, rows, ablation_figures(rows), simulated=True)
        if file is not None:
            file.write_text(json.dumps(document, indent=1) + "\n")


def _ablate_sim(
    place: dict[str, Any], profile: NodeProfile, variants: list[str], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    nodes, seconds = settings["sim_nodes"], settings["sim_seconds"]
    full_rate = SIM_RATE * work(load_profile("papers")) / work(profile) * nodes / SIM_NODES

    def trace(load: float, case: Case) -> list[TraceRequest]:
        laws = TraceOptions(
            place["seed"], RANKS, settings["functions"], full_rate * load, seconds, MEAN_OUTPUT,
            half=HALVES[place["half"]].functions, shifted=case.shifted,
        )  # fmt: skip
        return read_trace(MAF, laws)[1]

    return ablation_rows(
        {"study": "sim60", **place}, profile, nodes, variants, trace, settings["ablate_loads"], seconds
    )


def _ablate_bed(
    place: dict[str, Any], profile: NodeProfile, variants: list[str], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """TESTBED-8, simulated: every adapter is on the device."""
    cached = msgspec.structs.replace(profile, adapter_memory=None, host_memory=None)
    functions = bed_functions(place["seed"], settings["bed_functions"])
    bed = settings | {"bed_seconds": settings["ablate_bed_seconds"]}

    def trace(load: float, _: Case) -> list[TraceRequest]:
        rng = np.random.default_rng((place["seed"], 2))
        return poisson_trace(load * NODES / work(profile), bed, functions, profile.max_context, rng)

    place = {"study": "testbed8", **place}
    return ablation_rows(place, cached, NODES, variants, trace, settings["bed_loads"], bed["bed_seconds"])


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--profiles", default=",".join(profile_names()), help="committed ones, by commas (all)")
    parser.add_argument("--only", choices=("sim60", "testbed8"), help="leave the other one out")
    parser.add_argument("--seconds", type=float, help="of SIM-60's trace, instead of ten minutes")
    parser.add_argument("--ablate", choices=tuple(HALVES), help="one term off at a time, on this half; simulated")
    parser.add_argument("--variants", help="of --ablate, by commas (all)")
    parser.add_argument(
        "--part", type=int, default=1, help="SIM-60 with so many times fewer nodes, calls and functions"
    )
    options = parser.parse_args()
    settings: dict[str, Any] = dict(QUICK if options.quick else FULL)
    if options.ablate == "chosen" and not options.quick:
        settings |= SCREEN
    for name in ("sim_nodes", "functions"):
        settings[name] //= options.part
    if options.seconds:
        settings["sim_seconds"] = options.seconds
    profiles = options.profiles.split(",")[: 1 if options.quick else None]
    if options.ablate:
        variants = options.variants.split(",") if options.variants else all_variants()
        return ablate(profiles, options.ablate, variants, settings, options.json)
    probe, rows = ContentionProbe(), []
    for name in profiles:
        profile = load_profile(name)
        if options.only != "testbed8":
            rows += sim_rows(name, profile, settings, options.seed)
        if options.only != "sim60":
            rows += bed_rows(name, profile, options.model, settings, options.seed)
    settings |= {
        "slo": DEFAULT_SLO, "ranks": list(RANKS), "mean_output": MEAN_OUTPUT, "model": options.model.name,
        **probe.values(),
    }  # fmt: skip
    publish(report("scheduling", settings, options.seed, rows, figures_of(rows), simulated=True), options.json)


if __name__ == "__main__":
    main()
