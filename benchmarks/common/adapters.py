"""Adapters with random weights, as many of each rank as a study calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.peft_reference import make_adapter, redraw_adapter

TARGETS = ("q_proj", "k_proj", "v_proj")
LOAD_OVER_PREFILL = 0.68
"""Toppings: 30 ms to load a rank-64 adapter, 44 ms to compute 256 prompt tokens on a 7B."""


def make_adapters(
    model_dir: Path,
    root: Path,
    ranks: Sequence[int],
    seed: int,
    targets: Sequence[str] = TARGETS,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Writes an adapter of each of these ranks on `targets`, each with its own random weights."""
    first: dict[int, Path] = {}
    paths = []
    for i, rank in enumerate(ranks):
        path, adapter_seed = root / f"a{i}", (seed << 20) + i
        if rank in first:
            redraw_adapter(first[rank], path, adapter_seed)
        else:
            config: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": list(targets)}
            first[rank] = make_adapter(model_dir, path, adapter_seed, dtype, **config)
        paths.append(path)
    return paths
