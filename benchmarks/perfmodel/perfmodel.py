"""Fit of the performance model, and of the paper's two-parameter form, to passes of the real runner.

Every configuration is measured once a round, in another order each time; fits see medians over all rounds but the
first. The paper's grid (batches of 4, 8, 16 and 32, ranks 8 to 64) is measured apart, so that the whole model is judged
on it, too, without having seen it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, report, run_study
from cluster.node_table import ASSUMED
from cluster.performance_fit import DecodeSample, decode_forecast, fit_decode, fit_paper_form, fit_prefill
from cluster.performance_model import DecodeModel, PerformanceModel, rank_terms
from node_agent.config import RUNNERS
from node_agent.cores import usable_cores
from node_agent.device import DTYPES
from node_agent.performance.cases import LONG, Effort
from node_agent.performance.setup import GRID_CONTEXT, cold_costs, measure_grid, model_key
from node_agent.performance.sweep import all_cases, bench
from node_agent.runner.lora_choice import TRITON_KERNELS
from tests.support.local_engine import LocalEngine

QUICK = Effort((1, 2, 4, 8), (8, 16, 32, 64), 1, (16, 48, 96), 3, 1024)
WHATEVER = float("inf")
"""The study reports a bad fit; only a node refuses it."""
EVALUATIONS = 2000


def study(options: Any, root: Path) -> dict[str, Any]:
    threads = options.threads or usable_cores()
    torch.set_num_threads(threads)
    effort = QUICK if options.quick else replace(LONG, rounds=options.rounds)
    model_dir = options.model
    engine = LocalEngine(
        model_dir, root / "registry", dtype=options.dtype, threads=threads, runner=options.runner,
        lora_kernel=options.lora_kernel, adapter_memory=options.adapter_memory << 20, host_memory=64 << 20,
    )  # fmt: skip
    probe = ContentionProbe()
    try:
        with bench(engine.engine, engine.base, effort) as passes:
            sweep = passes.measure(all_cases(effort, passes.bounds, options.seed), effort.rounds)
            grid = _medians(measure_grid(passes, effort.rounds))
        engine.assert_clean()
        key, (to_device, exposed) = model_key(engine.engine, engine.base), cold_costs(engine.engine, engine.base)
    finally:
        engine.close()
    decode, prefill = fit_decode(sweep.decode, WHATEVER, rank_terms(key.kernel)), fit_prefill(sweep.prefill, WHATEVER)
    paper = {kernel: fit_paper_form(grid, kernel) for kernel in ("bgmv", "mbgmv")}
    model = PerformanceModel(key, decode.model, prefill.model, to_device, ASSUMED.from_store, exposed)
    qualities = {"decode": decode.quality, "prefill": prefill.quality}
    figures = {
        "r2_decode": decode.quality.r2,
        "r2_prefill": prefill.quality.r2,
        "r2_paper_form": paper["bgmv" if key.kernel == "bgmv" else "mbgmv"].r2,
        "r2_paper_bgmv": paper["bgmv"].r2,
        "r2_paper_mbgmv": paper["mbgmv"].r2,
        "r2_grid_whole_model": _r2_on(decode.model, grid),
        "r2_decode_repeats": _r2_of_repeats(sweep.decode),
        "heldout_median_error": max(quality.heldout_median_error for quality in qualities.values()),
        **{f"heldout_median_error_{name}": quality.heldout_median_error for name, quality in qualities.items()},
        **{f"set_aside_{name}": quality.set_aside for name, quality in qualities.items()},
        "eval_us": _evaluation_us(decode.model),
        **probe.values(),
    }
    rows = [
        {"kind": "model", "model": msgspec.to_builtins(model), "heldout_by_term": decode.heldout_by_term},
        *({"kind": name, "measured_ms": a * 1e3, "forecast_ms": b * 1e3}
          for name, quality in qualities.items() for a, b in quality.residuals),
        *({"kind": "grid", **msgspec.to_builtins(sample)} for sample in grid),
        *({"kind": "paper", **msgspec.to_builtins(form)} for form in paper.values()),
    ]  # fmt: skip
    settings = {
        "model": model_dir.name, "dtype": options.dtype, "threads": threads, "rounds": effort.rounds,
        "ranks": list(effort.ranks), "batches": list(effort.rows), "prompts": list(effort.tokens),
        "cache_tokens": effort.cache, "grid_context": GRID_CONTEXT, "quick": options.quick, "kernel": key.kernel,
        "runner": options.runner,
    }  # fmt: skip
    return report("perfmodel", settings, options.seed, rows, figures)


def _medians(samples: list[DecodeSample]) -> list[DecodeSample]:
    """Returns a sample for each configuration."""
    repeats = _repeats(samples)
    return [msgspec.structs.replace(case, seconds=median(seconds)) for case, seconds in repeats.items()]


def _repeats(samples: list[DecodeSample]) -> dict[DecodeSample, list[float]]:
    """Seconds of each configuration, in the order of its rounds."""
    by_case: dict[DecodeSample, list[float]] = {}
    for sample in samples:
        by_case.setdefault(msgspec.structs.replace(sample, seconds=0.0), []).append(sample.seconds)
    return by_case


def _r2_on(model: DecodeModel, samples: list[DecodeSample]) -> float:
    """Returns R^2 on samples to which the model was not fitted."""
    seconds = np.array([sample.seconds for sample in samples])
    forecast = np.array([decode_forecast(model, sample) for sample in samples])
    return _r2(seconds, forecast)


def _r2_of_repeats(samples: list[DecodeSample]) -> float:
    """Every other round as the forecast of the rest: what noise leaves of the R^2 of a forecast without error."""
    halves = [(median(seconds[::2]), median(seconds[1::2])) for seconds in _repeats(samples).values()]
    return _r2(*np.array(halves).T)


def _r2(seconds: np.ndarray, forecast: np.ndarray) -> float:
    return float(1 - ((seconds - forecast) ** 2).sum() / ((seconds - seconds.mean()) ** 2).sum())


def _evaluation_us(model: DecodeModel) -> float:
    """A forecast for a batch of 32 from its lists of ranks and contexts, as a record has them; median."""
    ranks, contexts = [8, 16, 32, 64] * 8, list(range(100, 132))
    times = []
    for _ in range(EVALUATIONS):
        begin = time.perf_counter()
        model.seconds(len(ranks), sum(contexts), sum(ranks))
        times.append(time.perf_counter() - begin)
    return median(times) * 1e6


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--runner", default="auto", choices=list(RUNNERS))
    parser.add_argument("--lora-kernel", default="auto", choices=["auto", *TRITON_KERNELS], help="the papers' two")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--adapter-memory", type=int, default=1400, metavar="MIB")
    options = parser.parse_args()
    run_study(study, options)


if __name__ == "__main__":
    main()
