"""LoRA for a batch whose tokens are grouped into segments by adapter: three small products per segment and projection.

The path of the CPU device, and of any device without a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add_segment(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    begin: int,
    end: int,
    a: torch.Tensor,
    parts: Sequence[tuple[int, int, int, torch.Tensor, float]],
) -> None:
    """ys[i][begin:end] += scale * (x[begin:end] @ a)[:, low:high] @ b for every (i, low, high, b, scale) in `parts`.

    ys    each [T, d_out], in place; rows outside begin..end are not touched
    x     [T, d_in]
    a     [d_in, sum of ranks]: the A of all projections that share x
    parts b is [rank, d_out]
    """
    xa = x[begin:end] @ a
    for i, low, high, b, scale in parts:
        ys[i][begin:end].addmm_(xa[:, low:high], b, alpha=scale)
