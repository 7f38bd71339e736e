"""LoRA for a batch whose tokens are grouped into segments by adapter: two products per segment and projection.

The path of the CPU device's long segments, and of any device without a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Part = tuple[int, int, int, torch.Tensor, float]
Piece = tuple[torch.Tensor, Sequence[Part]]
"""As in `add_pieces`."""


def add_pieces(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    begin: int,
    end: int,
    pieces: Sequence[Piece],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Adds ys[i][begin:end] += scale * (x[begin:end] @ A)[:, low:high] @ B for every output i that is adapted.

    A and B may lie in pieces, as rows of adapters do that lie in several pages. They are brought together here, and
    multiplied in `dtype`; outputs are rounded once. In bf16 oneDNN prepares a product anew for every number of tokens
    and ranks that it has not seen, which takes longer than it wins where these change from pass to pass.

    ys      each [T, d_out], in place; rows outside begin..end are not touched
    x       [T, d_in]
    pieces  (a, parts). a [d_in, ranks of the piece]: columns of A, in order, for all projections that share x.
            parts: (i, low, high, b, scale), with low and high among the piece's ranks, and b [high - low, d_out]: rows
            of B, in order. The parts of one output follow each other in A and have one scale; else ValueError.
    """
    if not pieces:
        return
    xa = x[begin:end].to(dtype) @ _together([a.t() for a, _ in pieces]).to(dtype).t()
    for i, (low, high, b, scale) in _outputs(pieces).items():
        y = ys[i][begin:end]
        summed = y.to(dtype).addmm_(xa[:, low:high], b.to(dtype), alpha=scale)
        if summed is not y:
            y.copy_(summed)


def _outputs(pieces: Sequence[Piece]) -> dict[int, tuple[int, int, torch.Tensor, float]]:
    """Returns, by output: the columns low..high-1 that it has in xA, B as a whole, and the scale. Raises ValueError
    when an output's parts don't follow each other or differ in scale."""
    found: dict[int, list[Part]] = {}
    at = 0
    for a, parts in pieces:
        for i, low, high, b, scale in parts:
            found.setdefault(i, []).append((i, at + low, at + high, b, scale))
        at += a.shape[1]
    outputs = {}
    for i, parts in found.items():
        (_, low, _, _, scale), (_, _, high, _, _) = parts[0], parts[-1]
        ends = [low, *(part[2] for part in parts)]
        if [part[1] for part in parts] != ends[:-1] or any(part[4] != scale for part in parts):
            raise ValueError(f"the parts of output {i} must follow each other in A, with one scale")
        outputs[i] = (low, high, _together([part[3] for part in parts]), scale)
    return outputs


def _together(rows: list[torch.Tensor]) -> torch.Tensor:
    """Returns all rows in one matrix."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
