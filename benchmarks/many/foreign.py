"""vLLM's load generator, unchanged, in place of the client of many.py.

It calls the stretch's functions in their order, at times that it draws itself (Poisson, of the same rate), with its own
prompts. Its figures are the row; all calls count, from a service that has nothing in memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.clients.foreign_clients import MODEL, Run
from benchmarks.common.http_service import HttpService
from benchmarks.common.report import captioned_table
from benchmarks.many.cells import Load
from benchmarks.many.tables import NAMES

PROMPT_TOKENS = 64
PERCENTILES = (50, 95, 99)


def foreign_row(service: HttpService, load: Load, environment: Path) -> dict[str, Any]:
    """`environment`: where clients/foreign_clients.py installed vLLM. Raises CalledProcessError, TimeoutExpired."""
    with tempfile.TemporaryDirectory() as scratch:
        run, file = Run(service.url, service.key, environment, Path(scratch)), Path(scratch) / "result.json"
        functions = [each.model for each in load.planned]
        run.call(
            "vllm", "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions", "--base-url", service.url,
            "--model", MODEL.name, "--tokenizer", str(MODEL), "--lora-modules", *functions,
            "--lora-assignment", "round-robin", "--dataset-name", "random", "--seed", "0", "--ignore-eos",
            "--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(load.tokens),
            "--num-prompts", str(len(functions)), "--request-rate", str(1 / load.gap_s), "--disable-tqdm",
            "--percentile-metrics", "ttft,e2el", "--metric-percentiles", ",".join(map(str, PERCENTILES)),
            "--save-result", "--result-filename", str(file),
        )  # fmt: skip
        return row_of(json.loads(file.read_text()))


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of the client's result."""
    times = {
        f"{ours}_p{share}_ms": result[f"p{share}_{theirs}_ms"]
        for ours, theirs in (("ttft", "ttft"), ("e2e", "e2el"))
        for share in PERCENTILES
    }
    return {
        "completed": result["completed"],
        "failed": result["failed"],
        "calls_s": result["request_throughput"],
        **times,
    }


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Percentiles by variant, ms, and `forecast` over `ondemand`."""
    figures = {f"ttft_p{share}_{row['variant']}": row[f"ttft_p{share}_ms"] for row in rows for share in PERCENTILES}
    if {"ttft_p95_ondemand", "ttft_p95_forecast"} <= figures.keys():
        figures["ttft_p95_over_ondemand"] = figures["ttft_p95_forecast"] / figures["ttft_p95_ondemand"]
    return figures | {"failed": float(sum(row["failed"] for row in rows))}


def foreign_table(document: dict[str, Any]) -> str:
    """Renders the client's figures of each variant."""
    settings = document["settings"]
    text = (
        f"`vllm bench serve`, {2 * settings['calls']} calls to {settings['adapters']:,} adapters in the order of the "
        f"stretch, {settings['calls_s']:.2f} a second, {PROMPT_TOKENS} tokens in and {settings['tokens']} out; once."
    )
    cells = [
        (
            NAMES[row["variant"]],
            f"{row['completed']}, {row['failed']}",
            ", ".join(f"{row[f'ttft_p{share}_ms'] / 1e3:.2f}" for share in PERCENTILES) + " s",
            ", ".join(f"{row[f'e2e_p{share}_ms'] / 1e3:.2f}" for share in PERCENTILES) + " s",
        )
        for row in document["rows"]
    ]
    head = ("", "completed, failed", "TTFT p50, p95, p99", "E2E p50, p95, p99")
    return captioned_table(document, text, head, cells)
