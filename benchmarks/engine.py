"""The engine in process against PEFT's own `generate`, with equal threads; the whole service over HTTP beside them.

Every round runs each variant once, in turn; figures are medians over rounds. TTFT is the median over the batch's
requests, all sent at once. Tokens/s counts generated tokens over the whole run, prefill included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.http_service import HttpService
from benchmarks.in_process import RANKS, TARGETS, Measured, PeftGenerate, Workload, run_engine
from benchmarks.local_engine import LocalEngine
from benchmarks.peft_reference import make_adapter
from benchmarks.report import ROOT, arguments, contention_probe, publish, report
from benchmarks.step_profile import breakdown
from cluster.messages import Adapter
from node_agent.cores import usable_cores

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
    model_dir, dtype = Path(options.model).absolute(), getattr(torch, options.dtype)
    paths = [
        make_adapter(model_dir, root / f"a{i}", i, dtype, r=r, lora_alpha=r, target_modules=TARGETS)
        for i, r in enumerate(RANKS)
    ]
    engine = LocalEngine(model_dir, root / "registry", dtype=options.dtype, threads=threads, kv_memory=512 << 20)
    adapters = [engine.deploy(path) for path in paths]
    peft = PeftGenerate(model_dir, paths, dtype)
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(3, engine.base.vocab_size - 64, (8, length), generator=generator).tolist()
    variants: dict[str, Callable[[Workload], Measured]] = {
        "engine": lambda w: run_engine(engine, adapters, w, prompts[: len(w.adapters)], count),
        "peft": lambda w: peft.run(w, prompts[: len(w.adapters)], count),
    }
    before = contention_probe()
    with HttpService(model_dir, paths, root / "service", options.dtype, threads) as service:
        variants["http"] = lambda w: Measured(*service.run(w.adapters, length, count))
        rows = measure(variants, rounds)
    figures = summarise(rows)
    batches: dict[str, Sequence[Adapter | None]] = {"base_8": [None] * 8, "mixed_8": adapters}
    for name, held in batches.items():
        spent = breakdown(engine, held, prompts)
        figures |= {f"{name}_{kind.replace(' ', '_')}_ms": value for kind, value in spent.items()}
    engine.close()
    figures |= {"probe_before_ms": before, "probe_after_ms": contention_probe()}
    settings = {
        "model": model_dir.name, "dtype": options.dtype, "threads": threads, "rounds": rounds, "prompt_tokens": length,
        "output_tokens": count, "ranks": RANKS, "targets": "q,k,v", "quick": options.quick,
    }  # fmt: skip
    return report("engine", settings, options.seed, rows, figures)


def measure(variants: dict[str, Callable[[Workload], Measured]], rounds: int) -> list[dict[str, Any]]:
    for workload in WORKLOADS:  # warm: adapters loaded, code paths taken once
        for run in variants.values():
            run(workload)
    rows: list[dict[str, Any]] = []
    for index in range(rounds):
        for workload in WORKLOADS:
            for name, run in variants.items():
                found = run(workload)
                rows.append({
                    "round": index, "workload": workload.name, "variant": name,
                    "ttft_ms": round(found.ttft * 1e3, 2), "tok_s": round(found.tokens_per_second, 2),
                })  # fmt: skip
    return rows


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over rounds; ratios are medians of the per-round ratios."""
    figures: dict[str, float] = {}
    prefixes = {"engine": "", "peft": "peft_", "http": "http_"}
    by_key = {(row["workload"], row["variant"], row["round"]): row for row in rows}
    rounds = sorted({row["round"] for row in rows})
    for workload in WORKLOADS:
        kind, size = workload.name.split("_")
        for variant, prefix in prefixes.items():
            for unit in ("tok_s", "ttft_ms"):
                values = [by_key[workload.name, variant, r][unit] for r in rounds]
                figures[f"{prefix}{kind}_{unit}_{size}"] = median(values)
        ratios = [
            by_key[workload.name, "engine", r]["tok_s"] / by_key[workload.name, "peft", r]["tok_s"] for r in rounds
        ]
        figures[f"over_peft_{workload.name}"] = median(ratios)
        figures[f"over_peft_{workload.name}_min"] = min(ratios)
    figures["over_peft"] = min(figures[f"over_peft_{w.name}"] for w in WORKLOADS)
    return figures


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        publish(study(options, Path(root)), options.json)


if __name__ == "__main__":
    main()
