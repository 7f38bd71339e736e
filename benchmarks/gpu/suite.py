"""All that needs a GPU, in one command of under eight minutes: a part for each question, in order of worth.

Each part's rows are in the JSON as soon as it ends. A part that fails does not end the run, one whose runner or kernels
are not there says so, and what time does not suffice for is named. Fails without a GPU.

smoke    every LoRA operation against float64, and what a layer computes between its products against plain torch
exact    a tiny model with drawn adapters, plans and arrivals against PEFT
merged   a 7B shape with drawn weights against the same weights with the adapter merged
graphs   decode steps with captured graphs and without
decode   steps of 1 to 256 rows over the bytes that they must read
prefill  prompts as a share of the peak of large products, and what an adapter adds
lora     8 and 32 distinct adapters in a decode step, ranks 8 to 128, by kernel; the papers' forms of its cost
same, handoff, points, loads   cold starts by link rate (cold_starts.py)
kernels  LoRA operations by shape over the copy bandwidth
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.report import arguments, publish, report, save
from benchmarks.gpu import cold_starts, exact, steps
from benchmarks.gpu.check import check_operations, draw_cases
from benchmarks.gpu.engine import EngineBox
from benchmarks.gpu.layer_check import SHAPES as LAYER_SHAPES
from benchmarks.gpu.layer_check import check_layers
from benchmarks.gpu.parts import Part, Rows, Skipped, failures, run_parts
from benchmarks.kernels.kernels import gpu_rows
from node_agent.config import RUNNERS

SECONDS = {
    "smoke": 60.0, "exact": 45.0, "merged": 35.0, "graphs": 20.0, "decode": 45.0, "prefill": 20.0, "lora": 70.0,
    "same": 25.0, "handoff": 15.0, "points": 55.0, "loads": 20.0, "kernels": 35.0,
}  # fmt: skip
QUICK_S = 60.0
CHECKS = 400
"""Drawn calls of each operation; what time doesn't suffice for is left out. Most of it goes into compiling."""
LORA_SHARE = 0.8
"""Share of the smoke part's time for LoRA operations; the rest is for a layer's others."""


@dataclass(frozen=True)
class Suite:
    """Engines on which the parts measure, shared by all of them."""

    box: EngineBox
    cold: cold_starts.ColdStudy
    quick: bool

    def parts(self) -> dict[str, Part]:
        """All of them, in order of worth."""
        cold = self.cold.parts()
        return {
            "smoke": self._smoke,
            "exact": cold["exact"],
            "merged": partial(exact.merged, self.box),
            "graphs": partial(steps.graphs, self.box),
            "decode": partial(steps.decode, self.box),
            "prefill": partial(steps.prefill, self.box),
            "lora": partial(steps.lora, self.box),
            **{name: partial(self._alone, cold[name]) for name in ("same", "handoff", "points", "loads")},
            "kernels": self._kernels,
        }

    def close(self) -> None:
        """Gives the device's memory back."""
        self.cold.close()
        self.box.close()

    def _smoke(self, until: float) -> Iterator[dict[str, Any]]:
        on_gpu = self.box.device.type == "cuda"
        sizes = (4200, 256) if on_gpu else (40, 9)
        cases = draw_cases(CHECKS if on_gpu else 1, self.box.seed, self.box.device.type, *sizes)
        yield from check_operations(cases, max(1.0, (until - time.monotonic()) * LORA_SHARE))
        yield from check_layers(self.box.device, self.box.seed, LAYER_SHAPES if on_gpu else LAYER_SHAPES[:2])

    def _alone(self, part: Part, until: float) -> Iterator[dict[str, Any]]:
        """A part of cold starts: their engine is another one."""
        self.box.close()
        yield from part(until)

    def _kernels(self, until: float) -> Iterator[dict[str, Any]]:
        if self.box.device.type != "cuda":
            raise Skipped("Triton's interpreter says nothing of times")
        yield {"copy_gb_s": steps.copy_bandwidth(self.box.device) / 1e9}
        yield from gpu_rows(self.quick, self.box.seed, max(1.0, until - time.monotonic()))


def figures_of(rows: Rows) -> dict[str, float]:
    """Names: `_b` rows of a step, `_t` prompt tokens, `_n` distinct adapters, `_r` their rank."""
    figures = {f"coldstart_{name}": value for name, value in cold_starts.figures_of(rows).items()}
    for row in rows:
        if row["part"] == "decode" and "rows" in row:
            figures[f"decode_over_floor_b{row['rows']}"] = row["over_floor"]
            figures[f"decode_ms_b{row['rows']}"], figures[f"served_ms_b{row['rows']}"] = row["ms"], row["served_ms"]
        elif row["part"] == "graphs" and "rows" in row:
            figures[f"graphs_speedup_b{row['rows']}"] = row["off_ms"] / row["on_ms"]
        elif row["part"] == "prefill" and "tokens" in row:
            figures[f"prefill_share_of_peak_t{row['tokens']}"] = row["share_of_peak"]
            figures[f"prefill_lora_over_base_t{row['tokens']}"] = row["lora_over_base"]
        elif row["part"] == "lora" and "adapters" in row:
            where = f"{row['kernel']}_{'qkv' if row['targets'] == 'q,k,v' else 'all'}_n{row['adapters']}_r{row['rank']}"
            figures[f"lora_over_base_{where}"] = row["over_base"]
            figures[f"lora_over_floor_{where}"] = (row["ms"] - row["base_ms"]) / row["floor_ms"]
        elif row["part"] == "merged" and "adapter_below" in row:
            figures |= {f"merged_{name}": row[name] for name in row if name.endswith("_below")}
    copy = next((row["copy_gb_s"] for row in rows if row["part"] == "kernels" and "copy_gb_s" in row), None)
    large = [row["gb_s"] for row in rows if row.get("run") == "mbgmv" and row["weight_bytes"] >= 64 << 20]
    if copy is not None and large:
        figures |= {"copy_gb_s": copy, "mbgmv_copy_share_from_64MB": min(large) / copy}
    mismatches = figures.pop("coldstart_mismatches", None)
    return figures | ({} if mismatches is None else {"mismatches": mismatches})


def study(
    root: Path,
    device: torch.device,
    shape: str,
    *,
    runner: str,
    parts: list[str],
    quick: bool,
    seed: int,
    seconds: float,
    done: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """`done` gets the report as far as it is, after every part."""
    box = EngineBox(root / "steps", shape, device, runner, seed)
    cold_root = root / "cold"
    for folder in (box.root, cold_root):
        folder.mkdir()
    suite = Suite(box, cold_starts.ColdStudy(cold_root, shape, device.type, runner, quick=quick, seed=seed), quick)
    settings = {
        "device": device.type, "shape": shape, "runner": runner, "dtype": box.dtype, "quick": quick,
        "seconds": seconds, "parts": parts,
    }  # fmt: skip

    def document(rows: Rows) -> dict[str, Any]:
        return report("gpu_suite", settings, seed, rows, figures_of(rows))

    chosen = {name: part for name, part in suite.parts().items() if name in parts}
    try:
        return document(run_parts(chosen, SECONDS, seconds, lambda rows: done(document(rows))))
    finally:
        suite.close()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--parts", default=",".join(SECONDS), help="what to run, of " + ", ".join(SECONDS))
    parser.add_argument("--runner", choices=tuple(RUNNERS), default="cuda", help="what computes the base model")
    parser.add_argument("--seconds", type=float, default=sum(SECONDS.values()), help="for all parts together")
    options = parser.parse_args()
    seconds = QUICK_S if options.quick else options.seconds
    parts = options.parts.split(",")
    if not set(parts) <= set(SECONDS):
        parser.error(f"--parts: there are {', '.join(SECONDS)}")
    if not torch.cuda.is_available():
        sys.exit("no GPU is here: benchmarks.kernels.kernels gives the floors")
    with tempfile.TemporaryDirectory() as root:
        document = study(
            Path(root), torch.device("cuda"), "7b", runner=options.runner, parts=parts, quick=options.quick,
            seed=options.seed, seconds=seconds, done=lambda partial_report: save(partial_report, options.json),
        )  # fmt: skip
    publish(document, options.json)
    if bad := failures(document):
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
