"""Decode: each adapter at its own rank (cost ~ the sum of ranks)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.decode import launch_decode
from kernels.launch import Launch, launch_for
from kernels.view import GroupView


def mbgmv(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    seg_start: torch.Tensor,
    seg_slot: torch.Tensor,
    view: GroupView,
    xa: torch.Tensor,
    max_rank: int,
    how: Launch | None = None,
) -> None:
    """ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for every segment's tokens t and its slot s, fp32 accumulation.

    ys        P tensors [T, d_out of p], in place; rows of base segments (slot -1) and of rank 0 are not touched
    x         [T, d_in], rows of stride 1
    seg_start i32[S + 1]: first token of each segment, and the end of the last
    seg_slot  i32[S], -1 = base
    view      the group's part of the AdapterTable; its dtype (fp32, fp16, bf16) is that of x and ys
    xa        f32[>= splits, >= P, >= T, capacity], scratch, in place
    max_rank  the batch's largest rank, or a bound on it, as the host knows it: at most the scratch's capacity
    how       tile sizes; None: those of this device

    Two launches, no allocation, no host synchronisation; ranks are read on the device. The same batch gives the same
    bits. Raises KernelArgumentError before anything is launched.
    """
    launch_decode(ys, x, seg_start, seg_slot, view, xa, max_rank, False, how or launch_for("mbgmv", x.device))
