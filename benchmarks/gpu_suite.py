"""Everything that needs a GPU, in one command of under eight minutes; one JSON object. Fails without a GPU.

Kernels: first every operation is held against the float64 reference; a wrong result ends the run. Then speed.
Cold starts: coldstart_gpu.py, which has a command of its own too. With both, each gets less time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import coldstart_gpu
from benchmarks.gpu_check import OPERATIONS, check_operations, draw_cases, scratch_for
from benchmarks.gpu_timing import gpu_seconds
from benchmarks.kernel_cases import Case, relative_error
from benchmarks.kernels import TIME_LIMIT_S, Shape, floor, gpu_rows
from benchmarks.peers import PEERS, installed_peers
from benchmarks.report import arguments, publish, report
from kernels.launch import launch_for

CHECKS, CHECK_SECONDS = 400, 100.0
"""Drawn calls of each operation; what time doesn't suffice for is left out. Most of it goes into compiling."""
PARTS = ("kernels", "coldstart")
PEER_TOLERANCE = 3e-2
"""bf16, and weights that were scaled before"""


def measure_shape(shape: Shape, seed: int) -> list[dict[str, Any]]:
    """Microseconds (median) of each operation that serves the shape, and of torch's products of the same weights."""
    case = shape.case(torch.bfloat16, "cuda", seed)
    runs: dict[str, Callable[[], object]] = {}
    for name in ("mbgmv", "bgmv", "sgmv") if shape.operation == "decode" else ("sgmv",):
        how, ys = launch_for(name, case.x.device), case.fresh()
        given = (ys, case.x, case.seg_start, case.seg_slot, case.view, scratch_for(case, how), case.max_rank, how)
        runs[name] = partial(OPERATIONS[name], *given)
    runs["torch"] = _torch_products(shape)
    skipped = _add_peers(runs, case)
    least = floor(shape, 2)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        seconds = gpu_seconds(run)
        rows.append({
            "shape": shape.name, "run": name, "us": round(seconds * 1e6, 2), "weight_bytes": least["weight_bytes"],
            "gb_s": round(least["bytes"] / seconds / 1e9, 1),
        })  # fmt: skip
    return rows + [{"shape": shape.name, "run": name, "skipped": why} for name, why in skipped.items()]


def _add_peers(runs: dict[str, Callable[[], object]], case: Case) -> dict[str, str]:
    """Adds the peers that compute the right result here; returns why the others are left out."""
    skipped = {}
    for name in installed_peers():
        try:
            ys, run = PEERS[name](case)
            run()
        except Exception as error:  # whatever another project's code raises: it is named in the report
            skipped[name] = f"{type(error).__name__}: {error}"
            continue
        found = relative_error(ys, case)
        if found <= PEER_TOLERANCE:
            runs[name] = run
        else:
            skipped[name] = f"its result is {found:.1e} off"
    return skipped


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


def _copy_bandwidth() -> float:
    """GB/s read plus written, of one large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source)) / 1e9


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to run, of " + ", ".join(PARTS))
    options = parser.parse_args()
    parts = options.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts: there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        sys.exit("no GPU is here: benchmarks.kernels gives the floors")
    share = 1 / len(parts)
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    bad: list[str] = []
    if "kernels" in parts:
        rows, figures = _kernels(options.quick, options.seed, share)
    if "coldstart" in parts:
        found = coldstart_gpu.run(
            60.0 if options.quick else share * coldstart_gpu.TOTAL_S, options.quick, options.seed, None
        )
        rows += [{"coldstart": row} for row in found["rows"]]
        figures |= {f"coldstart_{name}": value for name, value in found["figures"].items()}
        bad = coldstart_gpu.failures(found)
    settings = {"quick": options.quick, "parts": parts, "peers": installed_peers()}
    publish(report("gpu_suite", settings, options.seed, rows, figures), options.json)
    if bad:
        sys.exit("\n".join(bad))


def _kernels(quick: bool, seed: int, share: float) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and figures; `share` of the time that they have alone."""
    checked = check_operations(draw_cases(CHECKS, seed, "cuda"), 15.0 if quick else share * CHECK_SECONDS)
    copy = _copy_bandwidth()
    rows = [{"checked": row} for row in checked] + gpu_rows(quick, seed, share * TIME_LIMIT_S)
    figures = {"copy_gb_s": copy, "empty_launch_us": gpu_seconds(lambda: torch.empty(1, device="cuda").fill_(1)) * 1e6}
    large = [row for row in rows if row.get("run") == "mbgmv" and row["weight_bytes"] >= 64 << 20]
    if large:
        figures["mbgmv_copy_share_from_64MB"] = min(row["gb_s"] for row in large) / copy
    return rows, figures


if __name__ == "__main__":
    main()
