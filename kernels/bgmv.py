"""Decode as Punica's BGMV: every adapter padded to the batch's largest rank (cost ~ batch x largest rank)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.decode import launch_decode
from kernels.launch import Launch, launch_for
from kernels.view import GroupView


def bgmv(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    seg_start: torch.Tensor,
    seg_slot: torch.Tensor,
    view: GroupView,
    xa: torch.Tensor,
    max_rank: int,
    how: Launch | None = None,
) -> None:
    """ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp, with A_sp and B_sp padded by zero rows to the largest rank that
    the batch's slots have for projection p.

    ys        P tensors [T, d_out of p], in place; rows of base segments (slot -1) and of rank 0 are not touched
    x         [T, d_in], rows of stride 1
    seg_start i32[S + 1]: first token of each segment, and the end of the last
    seg_slot  i32[S], -1 = base
    view      the group's part of the AdapterTable; its dtype (fp32, fp16, bf16) is that of x and ys
    xa        f32[>= splits, >= P, >= T, capacity], scratch, in place
    max_rank  the batch's largest rank, or a bound on it, as the host knows it: at most the scratch's capacity
    how       tile sizes; None: those of this device

    Padding costs what it costs Punica (Chen et al. 2023), whose weights are stored with it: the AdapterTable has no
    such rows, so what lies behind an adapter's first row is read in their place, and set to zero. The largest rank is
    found on the device: a captured graph serves any ranks. Two launches, no allocation, no host synchronisation; the
    same batch gives the same bits. Raises KernelArgumentError before anything is launched.
    """
    launch_decode(ys, x, seg_start, seg_slot, view, xa, max_rank, True, how or launch_for("bgmv", x.device))
