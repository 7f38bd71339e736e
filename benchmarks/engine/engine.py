"""The engine in process against PEFT's own `generate`, with equal threads; the whole service over HTTP behind them.

Every round runs each variant in process once, in turn; figures are medians over rounds. PEFT (for the base:
transformers) runs in bf16 and in fp32, and counts in the one that is faster for the workload. TTFT is the median over
the batch's requests, all sent at once. Tokens/s counts generated tokens over the whole run, prefill included. A step is
the median of those in which the whole batch decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.http_service import HttpService
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, report, run_study
from benchmarks.common.rule import ratio_figures
from benchmarks.engine.in_process import RANKS, TARGETS, Measured, PeftGenerate, Workload, run_engine
from benchmarks.engine.prompts import measure_prompts, prompt_figures
from benchmarks.engine.step_profile import breakdown
from cluster.messages import Adapter
from node_agent.cores import usable_cores
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import make_adapter

PEERS = ("bfloat16", "float32")
WARM_TOKENS = 4
Run = Callable[[Workload, int], Measured]
WORKLOADS = (
    Workload("base_1", (None,)),
    Workload("base_8", (None,) * 8),
    Workload("mixed_1", (3,)),
    Workload("mixed_8", tuple(range(8))),
)


def study(options: Any, root: Path) -> dict[str, Any]:
    threads = options.threads or usable_cores()
    torch.set_num_threads(threads)
    rounds, count, length = (1, 4, 16) if options.quick else (options.rounds, 64, 128)
    model_dir, dtype = options.model, getattr(torch, options.dtype)
    paths = [
        make_adapter(model_dir, root / f"a{i}", i, dtype, r=r, lora_alpha=r, target_modules=TARGETS)
        for i, r in enumerate(RANKS)
    ]
    engine = LocalEngine(model_dir, root / "registry", dtype=options.dtype, threads=threads, kv_memory=512 << 20)
    adapters = [engine.deploy(path) for path in paths]
    peers = {name: PeftGenerate(model_dir, paths, getattr(torch, name)) for name in PEERS}
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(3, engine.base.vocab_size - 64, (8, length), generator=generator).tolist()
    variants: dict[str, Run] = {
        "engine": lambda w, tokens: run_engine(engine, adapters, w, prompts[: len(w.adapters)], tokens),
    }
    for name, peer in peers.items():
        variants[f"peft_{name}"] = partial(_run_peer, peer, prompts)
    probe = ContentionProbe()
    rows = measure(variants, rounds, count)
    # Only now: a service that nobody calls for some seconds measures its performance model.
    with HttpService(model_dir, paths, root / "service", options.dtype, threads) as service:
        over_http: dict[str, Run] = {"http": lambda w, tokens: Measured(*service.run(w.adapters, length, tokens))}
        rows += measure(over_http, rounds, count)
        prompt_rows = measure_prompts(engine, adapters, service, rounds)
    figures = summarise(rows) | prompt_figures(prompt_rows)
    batches: dict[str, Sequence[Adapter | None]] = {"base_8": [None] * 8, "mixed_8": adapters}
    for name, batch in batches.items():
        parts = breakdown(engine, batch, prompts)
        figures |= {f"{name}_{kind.replace(' ', '_')}_ms": value for kind, value in parts.items()}
    engine.close()
    figures |= probe.values()
    settings = {
        "model": model_dir.name, "dtype": options.dtype, "threads": threads, "rounds": rounds, "prompt_tokens": length,
        "output_tokens": count, "ranks": RANKS, "targets": "q,k,v", "quick": options.quick,
        "peer_dtype": "their faster one for each workload",
    }  # fmt: skip
    return report("engine", settings, options.seed, rows + prompt_rows, figures)


def _run_peer(peer: PeftGenerate, prompts: list[list[int]], workload: Workload, count: int) -> Measured:
    return peer.run(workload, prompts[: len(workload.adapters)], count)


def measure(variants: dict[str, Run], rounds: int, count: int) -> list[dict[str, Any]]:
    for workload in WORKLOADS:  # warm: adapters loaded, code paths taken once
        for run in variants.values():
            run(workload, WARM_TOKENS)
    rows: list[dict[str, Any]] = []
    for index in range(rounds):
        for workload in WORKLOADS:
            for name, run in variants.items():
                measured = run(workload, count)
                rows.append({
                    "round": index, "workload": workload.name, "variant": name,
                    "ttft_ms": round(measured.ttft * 1e3, 2), "tok_s": round(measured.tokens_per_second, 2),
                    "step_ms": None if measured.step is None else round(measured.step * 1e3, 3),
                })  # fmt: skip
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over rounds; ratios are medians of the per-round ratios, each with its worst round."""
    figures: dict[str, float] = {}
    by_key = {(row["workload"], row["variant"], row["round"]): row for row in rows}
    rounds = sorted({row["round"] for row in rows})

    def values(workload: str, variant: str, unit: str) -> list[float]:
        return [by_key[workload, variant, index][unit] for index in rounds]

    for name in (workload.name for workload in WORKLOADS):
        kind, size = name.split("_")
        peer = max((f"peft_{dtype}" for dtype in PEERS), key=lambda p: median(values(name, p, "tok_s")))
        for variant, prefix in {"engine": "", peer: "peft_", "http": "http_"}.items():
            for unit in ("tok_s", "ttft_ms"):
                figures[f"{prefix}{kind}_{unit}_{size}"] = median(values(name, variant, unit))
        rates = values(name, "engine", "tok_s"), values(name, peer, "tok_s")
        figures |= ratio_figures(f"over_peft_{name}", *rates, lower_is_better=False)
        stepper = min((f"peft_{dtype}" for dtype in PEERS), key=lambda p: median(values(name, p, "step_ms")))
        steps = values(name, stepper, "step_ms"), values(name, "engine", "step_ms")
        figures |= ratio_figures(f"step_over_peft_{name}", *steps, lower_is_better=False)
        figures[f"{name}_alone_step_ms"] = median(values(name, "engine", "step_ms"))
    figures["over_peft"] = min(figures[f"over_peft_{w.name}"] for w in WORKLOADS)
    return figures


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    run_study(study, options)


if __name__ == "__main__":
    main()
