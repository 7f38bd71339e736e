"""LoRA in torch for a batch whose tokens are grouped into segments by adapter.

Each segment and output takes two matrix products. This module is used for long segments on a CPU, and for all segments
on a device for which there is no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Part = tuple[int, int, int, torch.Tensor, float]
Piece = tuple[torch.Tensor, Sequence[Part]]
"""Columns of A with the corresponding parts of B; see `pieces` of `add_pieces`."""


def add_pieces(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    begin: int,
    end: int,
    pieces: Sequence[Piece],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Adds ys[i][begin:end] += scale * (x[begin:end] @ A)[:, low:high] @ B for each adapted output i.

    A and B are in several pieces if an adapter's rows are in several pages. The pieces are joined and multiplied in
    `dtype`; outputs are rounded once. fp32 is the default. In bf16 oneDNN prepares a kernel for each new combination of
    tokens and ranks; if these change from pass to pass, that takes longer than bf16 saves.

    ys      tensors [T, d_out], in place; rows outside [begin, end) are not changed
    x       [T, d_in]
    pieces  (a, parts). a [d_in, ranks of the piece]: columns of A, in order, for all projections that share x.
            parts: (i, low, high, b, scale). low and high are indices into the piece's ranks; b [high - low, d_out] has
            rows of B, in order. The parts of one output must be adjacent in A and have the same scale.

    Raises ValueError for parts that are not adjacent or differ in scale.
    """
    if not pieces:
        return
    xa = x[begin:end].to(dtype) @ _joined([a.t() for a, _ in pieces]).to(dtype).t()
    for i, (low, high, b, scale) in _outputs(pieces).items():
        y = ys[i][begin:end]
        summed = y.to(dtype).addmm_(xa[:, low:high], b.to(dtype), alpha=scale)
        if summed is not y:
            y.copy_(summed)


def _outputs(pieces: Sequence[Piece]) -> dict[int, tuple[int, int, torch.Tensor, float]]:
    """Returns (low, high, B, scale) by output, where [low, high) are its columns of xA.

    Raises ValueError if an output's parts are not adjacent or differ in scale.
    """
    parts_by_output: dict[int, list[Part]] = {}
    at = 0
    for a, parts in pieces:
        for i, low, high, b, scale in parts:
            parts_by_output.setdefault(i, []).append((i, at + low, at + high, b, scale))
        at += a.shape[1]
    outputs = {}
    for i, parts in parts_by_output.items():
        (_, low, _, _, scale), (_, _, high, _, _) = parts[0], parts[-1]
        ends = [low, *(part[2] for part in parts)]
        if [part[1] for part in parts] != ends[:-1] or any(part[4] != scale for part in parts):
            raise ValueError(f"the parts of output {i} must follow each other in A, with one scale")
        outputs[i] = (low, high, _joined([part[3] for part in parts]), scale)
    return outputs


def _joined(rows: list[torch.Tensor]) -> torch.Tensor:
    """Returns the matrices `rows` concatenated along their rows."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
