"""Fit of the performance model to a node with the real vLLM, with adapters' own ranks and with all ranks padded.

The cases are like those of `garnish profile`, with one draw of contexts: batches that grow row by row, and passes over
prompts, as dummy requests with dummy adapters through vLLM's own engine.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import ROOT, SMOLLM2, ContentionProbe, arguments, report, run_study
from benchmarks.perfmodel.vllm_process import Job
from garnish.child_messages import child_messages
from node_agent.config import EngineConfig, VllmConfig
from node_agent.performance.cases import LONG, Effort
from tests.support.environments import VLLM_PYTHON

QUICK = Effort((1, 2, 4), (8, 32), 1, (16, 32), 2, 512)
CACHE_TOKENS, SILENCE_S = 8192, 900.0


def study(options: Any, root: Path) -> dict[str, Any]:
    effort = QUICK if options.quick else replace(LONG, rounds=options.rounds, draws=1, cache=CACHE_TOKENS)
    stated = {
        "max_loras": options.max_loras, "max_lora_rank": options.max_lora_rank, "max_model_len": 4096,
        "max_num_seqs": 32, "enforce_eager": True,
    }  # fmt: skip
    engine = EngineConfig(
        model_dir=str(options.model), base_id=options.model.name, registry=str(root / "registry"), engine="vllm",
        vllm=VllmConfig(str(options.python), stated), dtype=options.dtype, host_memory=1 << 30,
    )  # fmt: skip
    probe = ContentionProbe()
    fitted = _measured(Job(os.getpid(), engine, effort, options.budget), options.python)
    decode, prefill = (_best(fitted[kind]) for kind in ("decode", "prefill"))
    errors = {kind: {form: _error(fit) for form, fit in fitted[kind].items()} for kind in ("decode", "prefill")}
    qualities = {"decode": decode["quality"], "prefill": prefill["quality"]}
    figures = {
        **{f"r2_{kind}": quality["r2"] for kind, quality in qualities.items()},
        **{f"heldout_median_error_{kind}": quality["heldout_median_error"] for kind, quality in qualities.items()},
        **{f"set_aside_{kind}": quality["set_aside"] for kind, quality in qualities.items()},
        "load_latency_ms": fitted["to_device"]["latency"] * 1e3,
        "load_gb_per_s": fitted["to_device"]["bandwidth"] / 1e9,
        "rounds": fitted["rounds"],
        **probe.values(),
    }
    rows = [
        {"kind": "model", "decode": decode["model"], "prefill": prefill["model"], "errors_by_padded_rank": errors,
         "heldout_by_term": decode["heldout_by_term"], "key": fitted["key"]},
        *({"kind": kind, "measured_ms": a * 1e3, "forecast_ms": b * 1e3}
          for kind, quality in qualities.items() for a, b in quality["residuals"]),
    ]  # fmt: skip
    settings = {
        "model": options.model.name, "dtype": options.dtype, "ranks": list(effort.ranks), "batches": list(effort.rows),
        "prompts": list(effort.tokens), "cache_tokens": effort.cache, "budget": options.budget,
        "quick": options.quick, **stated,
    }  # fmt: skip
    return report("perfmodel_vllm", settings, options.seed, rows, figures)


def _measured(job: Job, python: Path) -> dict[str, Any]:
    command = (str(python), "-m", "benchmarks.perfmodel.vllm_process")
    child = child_messages(
        command, job, doing="the measurement", patience=SILENCE_S, variables={"PYTHONPATH": str(ROOT)}
    )
    with contextlib.closing(child) as messages:
        for message in messages:
            if message["type"] == "fitted":
                return message
            print(message["text"], f"{message.get('share') or 0:.0%}", end="\r", flush=True)
    raise SystemExit("the measuring process ended too early; its log is above")


def _best(fits: dict[str, Any]) -> dict[str, Any]:
    """Returns the fit of the form with the smaller held-out error, as a node chooses."""
    best: dict[str, Any] = min(fits.values(), key=_error)
    return best


def _error(fit: dict[str, Any]) -> float:
    terms = fit.get("heldout_by_term")
    return float(min(terms.values()) if terms else fit["quality"]["heldout_median_error"])


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--python", type=Path, default=VLLM_PYTHON, help="the environment that has vLLM")
    parser.add_argument("--max-loras", type=int, default=4)
    parser.add_argument("--max-lora-rank", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=LONG.rounds)
    parser.add_argument("--budget", type=float, default=900.0, help="seconds; beyond it, fewer repeats are made")
    run_study(study, parser.parse_args())


if __name__ == "__main__":
    main()
