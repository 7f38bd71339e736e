"""LoRA for a batch whose tokens are grouped into segments by adapter: three small products per segment and projection.

The path of the CPU device, and of any device without a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Part = tuple[int, int, int, torch.Tensor, float]
"""As in `add_segment`."""


def add_segment(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    begin: int,
    end: int,
    a: torch.Tensor,
    parts: Sequence[Part],
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


def add_pieces(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    begin: int,
    end: int,
    pieces: Sequence[tuple[torch.Tensor, Sequence[Part]]],
) -> None:
    """`add_segment` for the sum of several (a, parts), as weights that lie in several pages need it.

    An output of 16 bits to which several parts are added is summed in fp32 and rounded once: rounding it after each
    part would cost more the more pages there are.
    """
    outputs = [i for _, parts in pieces for i, *_ in parts]
    if x.dtype is torch.float32 or len(outputs) == len(set(outputs)):
        for a, parts in pieces:
            add_segment(ys, x, begin, end, a, parts)
        return
    sums = {i: ys[i][begin:end].float() for i in set(outputs)}
    for a, parts in pieces:
        xa = x[begin:end] @ a
        for i, low, high, b, scale in parts:
            sums[i].add_(xa[:, low:high] @ b, alpha=scale)
    for i, total in sums.items():
        ys[i][begin:end] = total
