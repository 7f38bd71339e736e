"""The LoRA operations, shape by shape: what each must read, and how long it takes where it can run.

A GPU, when there is one: each Triton kernel with the cache flushed before every call, next to torch's own products, as
shares of the copy bandwidth measured in the same run. Without one: bytes and launches per shape, and the CPU's compiled
operator next to torch and a plain read of the same bytes. steps.py has the compiler's report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.common.report import ContentionProbe, arguments, publish, report
from benchmarks.gpu.check import OPERATIONS, scratch_for
from benchmarks.gpu.timing import FLUSH_BYTES, gpu_seconds
from kernels.compiled import CompiledGroup, Segments, load_operators
from kernels.grouped import add_pieces
from kernels.launch import column_blocks, default_launch, launch_for
from tests.support.kernel_cases import Case, draw_case, draw_slots

MIXED = (8, 16, 32, 64, 128, 8, 16, 32)
TIME_LIMIT_S = 330
"""Limit of these in the GPU suite, after its checks. Shapes left out are named in the report."""


@dataclass(frozen=True)
class Shape:
    operation: str
    requests: int
    tokens: int
    ranks: tuple[int, ...]
    d_in: int
    d_outs: tuple[int, ...]
    popularity: str = "distinct"

    @property
    def name(self) -> str:
        ranks = str(self.ranks[0]) if len(set(self.ranks)) == 1 else "mixed"
        widths = "+".join(map(str, self.d_outs))
        return f"{self.operation} {self.requests}x{self.tokens} rank {ranks} {self.d_in}->{widths}"

    def case(self, dtype: torch.dtype, device: str, seed: int) -> Case:
        slots = draw_slots(self.popularity, self.requests, len(self.ranks), torch.Generator().manual_seed(seed))
        segments = [(slot, self.tokens) for slot in slots]
        return draw_case(self.ranks, segments, self.d_in, self.d_outs, dtype, seed, scattered=False, device=device)


def shapes(quick: bool) -> Iterator[Shape]:
    widths = (2048,) if quick else (2048, 4096, 8192)
    for width in widths:
        for requests in (1, 8) if quick else (1, 8, 32, 64, 256):
            for ranks in ((16,), MIXED) if quick else ((8,), (16,), (64,), (256,), MIXED):
                if ranks == MIXED and requests == 1:
                    continue
                several = tuple(ranks[i % len(ranks)] for i in range(min(requests, 32)))
                yield Shape("decode", requests, 1, several, width, (width, width // 4, width // 4))
        for tokens in (16,) if quick else (16, 256, 1024, 4096):
            yield Shape("prefill", 1, tokens, (16,), width, (width, width // 4, width // 4))
            yield Shape("prefill", 4, max(1, tokens // 4), (8, 16, 64, 128), width, (width, width // 4, width // 4))


def floor(shape: Shape, itemsize: int) -> dict[str, Any]:
    """Bytes and launches that no implementation can go below, and the programs that ours starts."""
    how = default_launch("mbgmv" if shape.operation == "decode" else "sgmv")
    used = min(shape.requests, len(shape.ranks)) if shape.popularity == "distinct" else len(shape.ranks)
    ranks = sum(shape.ranks[:used])
    tokens = shape.requests * shape.tokens
    outs = sum(shape.d_outs)
    weights = ranks * (len(shape.d_outs) * shape.d_in + outs) * itemsize
    segments = shape.requests
    tiles = segments if shape.operation == "decode" else -(-tokens // how.tokens) + segments
    return {
        "shape": shape.name,
        "operation": shape.operation,
        "weight_bytes": weights,
        "bytes": weights + tokens * (shape.d_in + 2 * outs) * itemsize,
        "launches": 2,
        "shrink_programs": tiles * len(shape.d_outs) * how.rank_programs * how.splits,
        "expand_programs": tiles * column_blocks(shape.d_outs, how.expand_width),
    }


def cpu_rows(quick: bool, seed: int) -> list[dict[str, Any]]:
    """A decode step's LoRA on q,k,v of SmolLM2 (30 layers) and of a 12-layer, 768-wide model, eight adapters."""
    rounds, rows = 3 if quick else 9, []
    for name, layers, d_in, d_outs in (("SmolLM2", 30, 576, (576, 192, 192)), ("12x768", 12, 768, (768, 768, 768))):
        for dtype in (torch.bfloat16, torch.float32):
            for label, ranks in (("mixed", MIXED), ("padded", (128,) * 8)):
                shape = Shape("decode", 8, 1, ranks, d_in, d_outs)
                cases = [shape.case(dtype, "cpu", seed + layer) for layer in range(layers)]
                timings = _time_cpu(cases, rounds)
                size = sum(case.weight_bytes() for case in cases)
                rows.append({"model": name, "dtype": str(dtype)[6:], "ranks": label, "weight_bytes": size, **timings})
    return rows


def segment_rows(quick: bool, seed: int) -> list[dict[str, Any]]:
    """Times a prompt's segment of one adapter on SmolLM2's q,k,v, ten layers, by length: torch wins at long ones."""
    rounds, rows = 3 if quick else 9, []
    for dtype in (torch.bfloat16, torch.float32):
        for rank in (8, 64):
            for tokens in (8, 32) if quick else (4, 8, 16, 32, 64, 128, 256):
                shape = Shape("prefill", 1, tokens, (rank,), 576, (576, 192, 192))
                cases = [shape.case(dtype, "cpu", seed + layer) for layer in range(10)]
                rows.append({"dtype": str(dtype)[6:], "rank": rank, "tokens": tokens, **_time_cpu(cases, rounds)})
    return rows


def _time_cpu(cases: list[Case], rounds: int) -> dict[str, float]:
    """Milliseconds (medians), the variants in turn, each after the caches were emptied."""
    operators, threads = load_operators(), torch.get_num_threads()
    tokens, d_in = cases[0].x.shape
    widths = [y.shape[1] for y in cases[0].ys]
    groups = [CompiledGroup(operators, case.view, d_in, widths) for case in cases]
    segments = [Segments(c.seg_start, c.seg_slot, tokens, max(c.ranks), d_in, threads) for c in cases]
    outputs = [case.fresh() for case in cases]
    views = [_torch_views(case) for case in cases]
    plain = torch.ones(sum(case.weight_bytes() for case in cases) // 4)

    def compiled() -> None:
        for group, case, ys, shared in zip(groups, cases, outputs, segments, strict=True):
            group.add(ys, case.x, shared)

    def by_torch() -> None:
        for segments, case, ys in zip(views, cases, outputs, strict=True):
            bounds = case.seg_start.tolist()
            for begin, end, (a, parts) in zip(bounds, bounds[1:], segments, strict=False):
                add_pieces(ys, case.x, begin, end, [(a, parts)])

    variants: dict[str, Callable[[], object]] = {
        "compiled_ms": compiled, "torch_ms": by_torch, "read_ms": lambda: torch.dot(plain, plain)
    }  # fmt: skip
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            flush.fill_(1)
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: round(median(values) * 1e3, 3) for name, values in times.items()}


def _torch_views(case: Case) -> list[tuple[torch.Tensor, list[tuple[int, int, int, torch.Tensor, float]]]]:
    """Returns the tensors that the torch path reads: per segment one A for the whole group, and each projection's B."""
    view, segments = case.view, []
    for slot in case.seg_slot.tolist():
        rank = case.ranks[slot]
        parts, a = [], []
        for p, y in enumerate(case.ys):
            firsts = view.first[slot, p].tolist()
            at = [int(view.row_offset[first]) * view.unit for first in firsts]
            strides = [-(-width // view.unit) * view.unit for width in (case.x.shape[1], y.shape[1])]
            a.append(view.pool.as_strided((rank, case.x.shape[1]), (strides[0], 1), at[0]))
            b = view.pool.as_strided((rank, y.shape[1]), (strides[1], 1), at[1])
            parts.append((p, p * rank, (p + 1) * rank, b, float(view.scale[slot, p])))
        segments.append((torch.cat(a).t(), parts))
    return segments


def measure_shape(shape: Shape, seed: int) -> list[dict[str, Any]]:
    """Microseconds (median) of each operation that serves the shape, and of torch's products of the same weights."""
    case = shape.case(torch.bfloat16, "cuda", seed)
    runs: dict[str, Callable[[], object]] = {}
    for name in ("mbgmv", "bgmv", "sgmv") if shape.operation == "decode" else ("sgmv",):
        how = launch_for(name, case.x.device)
        runs[name] = partial(OPERATIONS[name], case.call(xa=scratch_for(case, how)), how)
    runs["torch"] = _torch_products(shape)
    lower_bound = floor(shape, 2)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        seconds = gpu_seconds(run)
        rows.append({
            "shape": shape.name, "run": name, "us": round(seconds * 1e6, 2),
            "weight_bytes": lower_bound["weight_bytes"],
            "gb_s": round(lower_bound["bytes"] / seconds / 1e9, 1),
        })  # fmt: skip
    return rows


def _torch_products(shape: Shape) -> Callable[[], object]:
    """Returns a call of a padded pair of batched products per projection, plain torch's best for a mixed batch."""
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


def gpu_rows(quick: bool, seed: int, limit: float = TIME_LIMIT_S) -> list[dict[str, Any]]:
    """Every operation at every shape in bf16, until the time is up."""
    begin, rows = time.monotonic(), []
    for shape in shapes(quick):
        if time.monotonic() - begin > limit:
            rows.append({"shape": shape.name, "skipped": "time is up"})
        else:
            rows += measure_shape(shape, seed)
    return rows


def study(quick: bool, seed: int) -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    probe = ContentionProbe()
    rows: list[dict[str, Any]] = [floor(shape, 2) for shape in shapes(quick)]
    rows += [{"cpu": row} for row in cpu_rows(quick, seed)]
    rows += [{"segment": row} for row in segment_rows(quick, seed)]
    if gpu:
        rows += [{"gpu": row} for row in gpu_rows(quick, seed)]
    figures = probe.values()
    for row in (row["cpu"] for row in rows if "cpu" in row):
        key = f"{row['model']}_{row['dtype']}_{row['ranks']}"
        figures[f"cpu_{key}_ms"] = row["compiled_ms"]
        figures[f"cpu_{key}_over_read"] = row["compiled_ms"] / row["read_ms"]
        figures[f"cpu_{key}_over_torch"] = row["torch_ms"] / row["compiled_ms"]
    settings = {"quick": quick, "threads": torch.get_num_threads(), "gpu": gpu, "flush_bytes": FLUSH_BYTES}
    return report("kernels", settings, seed, rows, figures)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    publish(study(options.quick, options.seed), options.json)


if __name__ == "__main__":
    main()
