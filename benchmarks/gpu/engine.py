"""The engine that parts of suite.py measure: a base of some shape with drawn weights, one engine at a time."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path

import torch

from benchmarks.gpu.parts import Skipped
from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.setup import find_runner
from tests.support.local_engine import LocalEngine
from tests.support.random_model import random_weights, write_base

GIB = 1 << 30


@dataclass(frozen=True)
class Scale:
    """Sizes of what is measured on a shape, and the memory for it."""

    rows: tuple[int, ...]
    context: int
    """tokens; fewer where the cache is full"""
    prompts: tuple[int, ...]
    adapters: tuple[int, ...]
    """distinct adapters in a batch, a row each"""
    ranks: tuple[int, ...]
    kv_memory: int
    adapter_memory: int
    rounds: int
    """rounds of each pass; the first is dropped"""


SCALES = {
    "7b": Scale(
        rows=(1, 2, 4, 8, 16, 32, 64, 128, 256), context=512, prompts=(512, 1024, 2048), adapters=(8, 32),
        ranks=(8, 16, 32, 64, 128), kv_memory=16 * GIB, adapter_memory=22 * GIB, rounds=8,
    ),
    "tiny": Scale(
        rows=(1, 2, 6), context=16, prompts=(16,), adapters=(2, 3), ranks=(2, 3, 4, 5, 6, 7), kv_memory=4 << 20,
        adapter_memory=4 << 20, rounds=2,
    ),
}  # fmt: skip


@dataclass
class EngineBox:
    """Holds at most one engine of the shape: two would not fit on a GPU."""

    root: Path
    shape: str
    device: torch.device
    runner: str
    seed: int
    _engine: LocalEngine | None = None
    _kernel: str = ""
    written: set[int] = field(default_factory=set)

    @property
    def scale(self) -> Scale:
        return SCALES[self.shape]

    @property
    def dtype(self) -> str:
        """The papers' engine computes as it did for them."""
        return "float16" if self.runner == "lightllm" else "bfloat16"

    def get(self, kernel: str = "auto") -> LocalEngine:
        """Returns the engine with this LoRA kernel. Raises Skipped when there is none."""
        if self._engine is None or self._kernel != kernel:
            self.close()
            self._engine, self._kernel = self._build(kernel), kernel
        return self._engine

    def close(self) -> None:
        """Gives the device's memory back."""
        engine, self._engine, self.written = self._engine, None, set()
        if engine is not None:
            engine.close()
        del engine
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _build(self, kernel: str) -> LocalEngine:
        if "load" not in signature(find_runner(self.runner)).parameters:
            raise Skipped(f"runner {self.runner} takes no drawn weights")
        base = self.root / self.shape
        if not base.exists():
            write_base(base, self.shape, self.seed)
        scale = self.scale
        try:
            return LocalEngine(
                base, self.root / "registry", random_weights(self.runner, self.seed, self.device), runner=self.runner,
                device=self.device.type, dtype=self.dtype, threads=1, cpu_workers=0, cold_start="wait",
                lora_kernel=kernel, max_rows=max(scale.rows), chunk_tokens=max(*scale.prompts, max(scale.rows)),
                kv_memory=scale.kv_memory, adapter_memory=scale.adapter_memory, host_memory=scale.adapter_memory // 4,
            )  # fmt: skip
        except ValueError as error:
            if not str(error).startswith(("runner:", "lora_kernel:")):
                raise
            raise Skipped(f"runner {self.runner}, kernel {kernel}: {error}") from error


def adapter_bytes(store: AdapterStore, rank: int, targets: tuple[int, ...]) -> int:
    """Returns the bytes that a decode step reads of an adapter that adapts `targets` in every layer."""
    width = sum(sum(store.base.widths[target]) for target in targets)
    return store.base.num_layers * rank * width * store.pool.data.element_size()
