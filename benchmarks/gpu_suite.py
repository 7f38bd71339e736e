"""Everything that needs a GPU, in one command of under eight minutes; one JSON object. Fails without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.kernels import FLUSH_BYTES, Shape, floor, gpu_rows
from benchmarks.report import arguments, publish, report
from kernels.bgmv import bgmv, rank_bucket
from kernels.mbgmv import mbgmv
from kernels.sgmv import sgmv

ROUNDS = 15


def measure_shape(shape: Shape, seed: int) -> list[dict[str, Any]]:
    """Microseconds (median) of each operation that serves the shape, and of torch's products of the same weights."""
    case = shape.case(torch.bfloat16, "cuda", seed)
    ys, arguments_of = case.fresh(), (case.x, case.seg_start, case.seg_slot, case.view)
    pad = rank_bucket(max(case.ranks))
    scratch = torch.empty(*case.xa.shape[:3], max(pad, case.xa.shape[3]), device="cuda")
    runs: dict[str, Callable[[], object]] = {"sgmv": lambda: sgmv(ys, *arguments_of, scratch)}
    if shape.operation == "decode":
        runs["mbgmv"] = lambda: mbgmv(ys, *arguments_of, scratch)
        runs["bgmv"] = lambda: bgmv(ys, *arguments_of, scratch, pad)
    runs["torch"] = _torch_products(shape)
    least = floor(shape, 2)
    rows = []
    for name, run in runs.items():
        seconds = _time(run)
        rows.append({
            "shape": shape.name, "run": name, "us": round(seconds * 1e6, 2), "weight_bytes": least["weight_bytes"],
            "gb_s": round(least["bytes"] / seconds / 1e9, 1),
        })  # fmt: skip
    return rows


def _torch_products(shape: Shape) -> Callable[[], object]:
    """One padded pair of batched products per projection: what plain torch does best with a mixed batch."""
    rank, requests = max(shape.ranks), shape.requests
    x = torch.randn(requests, shape.tokens, shape.d_in, dtype=torch.bfloat16, device="cuda")
    pairs = [
        (
            torch.randn(requests, shape.d_in, rank, dtype=torch.bfloat16, device="cuda"),
            torch.randn(requests, rank, width, dtype=torch.bfloat16, device="cuda"),
        )
        for width in shape.d_outs
    ]
    return lambda: [torch.bmm(torch.bmm(x, a), b) for a, b in pairs]


def _time(run: Callable[[], object]) -> float:
    """Seconds by CUDA events, the cache flushed before every call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    run()
    times = []
    for _ in range(ROUNDS):
        flush.fill_(1)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _copy_bandwidth() -> float:
    """GB/s read plus written, of one large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _time(lambda: target.copy_(source)) / 1e9


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU is here: benchmarks.kernels gives the floors")
    copy = _copy_bandwidth()
    rows = gpu_rows(options.quick, options.seed)
    figures = {"copy_gb_s": copy, "empty_launch_us": _time(lambda: torch.empty(1, device="cuda").fill_(1)) * 1e6}
    large = [row for row in rows if row.get("run") == "mbgmv" and row["weight_bytes"] >= 64 << 20]
    if large:
        figures["mbgmv_copy_share_from_64MB"] = min(row["gb_s"] for row in large) / copy
    publish(report("gpu_suite", {"quick": options.quick}, options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
