"""The time to a first token on a GPU at the link's own rate, by prompt length and way of loading: in under a minute.

A 7B shape with drawn weights and one adapter of rank 64 on q, k and v, in pinned host memory. Every call of a way but
`cached` finds the adapter off the device. Calls come one at a time, from the submit to the engine to its token.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.report import arguments, publish, report
from benchmarks.gpu.cold_rig import Bench, build

WAYS = ("cached", "ondmd", "overlap", "pipeline", "full")
LENGTHS = (64, 256, 512, 1024)
RANK, CALLS = 64, 7


def measure(bench: Bench, lengths: tuple[int, ...], calls: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of each call; the first of a length is not counted."""
    ((_, adapters),) = bench.adapters.items()
    for tokens in lengths:
        for mode in WAYS:
            bench.ttft("overlap", adapters[:1], bench.prompts(tokens, 1))
            times = [bench.ttft(mode, adapters[:1], bench.prompts(tokens, 1)) for _ in range(calls)]
            yield {"tokens": tokens, "way": mode, "ms": [round(seconds * 1e3, 1) for seconds in times]}


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns, by prompt length, `ttft_ms` of a warm call, and the modes' ratios to it."""
    figures: dict[str, float] = {}
    for row in rows:
        if row["way"] == "cached":
            figures[f"ttft_ms_t{row['tokens']}"] = warm = median(row["ms"])
        else:
            figures[f"{row['way']}_over_cached_t{row['tokens']}"] = median(row["ms"]) / warm
    return figures


def study(root: Path, shape: str, device: str, rank: int, lengths: tuple[int, ...], calls: int, seed: int) -> Any:
    bench = build(root, shape, device, {rank: 1}, seed, "cuda")
    try:
        rows = list(measure(bench, lengths, calls))
    finally:
        bench.engine.close()
    settings = {"shape": shape, "runner": "cuda", "dtype": "bfloat16", "rank": rank, "calls": calls}
    return report("gpu_ttft", settings, seed, rows, figures_of(rows))


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU is here: benchmarks.coldstart.default measures cold starts on a CPU, over a simulated link")
    calls = 2 if options.quick else CALLS
    with tempfile.TemporaryDirectory() as root:
        publish(study(Path(root), "7b", "cuda", RANK, LENGTHS, calls, options.seed), options.json)


if __name__ == "__main__":
    main()
