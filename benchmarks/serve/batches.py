"""Serving, in process: eight requests of the base, of eight adapters, and of the same adapters padded to one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from adapters.base_model import PROJECTIONS, BaseModel
from benchmarks.common.rule import ratio_figures
from benchmarks.engine.in_process import RANKS, TARGETS, Measured, PeftGenerate, Workload, run_engine
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import make_adapter, pad_adapter

BASE, MIXED = Workload("base_8", (None,) * len(RANKS)), Workload("mixed_8", tuple(range(len(RANKS))))
PEER_DTYPES = ("bfloat16", "float32")
"""PEFT runs in both, and counts in the one that is faster for the batch."""
READ_BYTES = 256 << 20
"""Many times any cache of one socket, so that it is memory that is read."""
READS = 5
WARM_TOKENS = 4
ADAPTER_MEMORY = 512 << 20
"""Room for the eight adapters and their padded twins: nothing is loaded while the time is taken."""


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    threads: int
    rounds: int
    prompt_tokens: int
    output_tokens: int
    seed: int


class Batches:
    """A base model with its adapters in the engine and in PEFT. Close it before the next is made."""

    def __init__(self, model_dir: Path, root: Path, shape: Shape) -> None:
        self.shape = shape
        paths = [
            make_adapter(model_dir, root / f"a{i}", i, shape.dtype, r=r, lora_alpha=r, target_modules=TARGETS)
            for i, r in enumerate(RANKS)
        ]
        padded = [pad_adapter(path, root / f"padded{i}", max(RANKS)) for i, path in enumerate(paths)]
        self.engine = LocalEngine(
            model_dir, root / "registry", dtype=str(shape.dtype).removeprefix("torch."), threads=shape.threads,
            kv_memory=512 << 20, adapter_memory=ADAPTER_MEMORY, device="cpu",
        )  # fmt: skip
        self.adapters = [self.engine.deploy(path) for path in paths]
        self.padded = [self.engine.deploy(path) for path in padded]
        self.peers = {name: PeftGenerate(model_dir, paths, getattr(torch, name)) for name in PEER_DTYPES}
        generator = torch.Generator().manual_seed(shape.seed)
        size = (len(RANKS), shape.prompt_tokens)
        self.prompts = torch.randint(3, self.engine.base.vocab_size - 64, size, generator=generator).tolist()
        self.adapter_bytes = adapter_bytes(self.engine.base, RANKS, shape.dtype.itemsize)

    def variants(self, count: int) -> dict[str, Callable[[], Measured]]:
        """Returns calls of a batch each, of `count` tokens per request."""
        engine, prompts = self.engine, self.prompts
        return {
            "base": lambda: run_engine(engine, self.adapters, BASE, prompts, count),
            "mixed": lambda: run_engine(engine, self.adapters, MIXED, prompts, count),
            "padded": lambda: run_engine(engine, self.padded, MIXED, prompts, count),
        } | {
            f"peft_{kind}_{name}": partial(peer.run, workload, prompts, count)
            for name, peer in self.peers.items()
            for kind, workload in (("base", BASE), ("mixed", MIXED))
        }

    def measure(self) -> list[dict[str, Any]]:
        """Returns a row per round with every variant once, in turn forwards and backwards."""
        for run in self.variants(WARM_TOKENS).values():
            run()
        variants = self.variants(self.shape.output_tokens)
        buffer = torch.ones(READ_BYTES // 4)
        rows = []
        for index in range(self.shape.rounds):
            row: dict[str, Any] = {"round": index, "read_gb_s": round(read_bandwidth(buffer) / 1e9, 2)}
            for name in list(variants)[:: -1 if index % 2 else 1]:
                measured = variants[name]()
                row[f"{name}_tok_s"] = round(measured.tokens_per_second, 2)
                row[f"{name}_ttft_ms"] = round(measured.ttft * 1e3, 2)
                row[f"{name}_step_ms"] = None if measured.step is None else round(measured.step * 1e3, 3)
            rows.append(row)
        return rows

    def close(self) -> None:
        self.engine.close()


def adapter_bytes(base: BaseModel, ranks: tuple[int, ...], itemsize: int) -> int:
    """Bytes of weights that a step with one request of each adapter must read: A and B of q, k and v in all layers."""
    widths = [base.widths[PROJECTIONS.index(name.removesuffix("_proj"))] for name in TARGETS]
    return sum(ranks) * sum(d_in + d_out for d_in, d_out in widths) * base.num_layers * itemsize


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes/s of reading the buffer once with torch's threads: the median of a few reads."""
    times = []
    for _ in range(READS):
        begin = time.perf_counter()
        torch.dot(buffer, buffer)
        times.append(time.perf_counter() - begin)
    return buffer.nbytes / median(times)


def figures_of(rows: list[dict[str, Any]], weight_bytes: int) -> dict[str, float]:
    """Returns medians over the rounds; every ratio is the median of the rounds' own ratios, with its worst round."""
    rows = [row | _fastest_peer(rows, row) for row in rows]
    figures = {name: median(row[name] for row in rows) for name in rows[0] if name != "round"}
    added = [(row["mixed_step_ms"] - row["base_step_ms"]) / (weight_bytes / row["read_gb_s"] / 1e6) for row in rows]
    figures |= {"added_step_over_floor": median(added), "added_step_over_floor_max": max(added)}
    for name, over, under in (
        ("over_peft", "mixed_tok_s", "peft_mixed_tok_s"),
        ("over_peft_static_base", "base_tok_s", "peft_base_tok_s"),
        ("padded_over_mixed_step", "padded_step_ms", "mixed_step_ms"),
    ):
        columns = ([row[column] for row in rows] for column in (over, under))
        figures |= ratio_figures(name, *columns, lower_is_better=False)
    return figures


def _fastest_peer(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, float]:
    """Returns this round's figures of PEFT in the dtype that is fastest in the median of all rounds, by batch."""
    columns: dict[str, float] = {}
    for kind in ("base", "mixed"):
        best = max(PEER_DTYPES, key=lambda dtype: median(row[f"peft_{kind}_{dtype}_tok_s"] for row in rows))
        columns |= {
            f"peft_{kind}_{unit}": row[f"peft_{kind}_{best}_{unit}"] for unit in ("tok_s", "ttft_ms", "step_ms")
        }
    return columns
