"""Decode: every adapter walked to the batch's largest rank (cost ~ batch x largest rank)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.decode import launch_decode
from kernels.launch import Launch, launch_for
from kernels.view import GroupView


def rank_bucket(max_rank: int, least: int = 16) -> int:
    """The power of two that `bgmv` pads a batch of this largest rank to."""
    return max(least, 1 << (max(1, max_rank) - 1).bit_length())


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
    """ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp, with A_sp and B_sp padded by zero rows to
    `rank_bucket(max_rank)`.

    ys        P tensors [T, d_out of p], in place; rows of base segments (slot -1) and of rank 0 are not touched
    x         [T, d_in], rows of stride 1
    seg_start i32[S + 1]: first token of each segment, and the end of the last
    seg_slot  i32[S], -1 = base
    view      the group's part of the AdapterTable; its dtype (fp32, fp16, bf16) is that of x and ys
    xa        f32[>= splits, >= P, >= T, capacity], scratch, in place
    max_rank  the batch's largest rank as the host knows it; its bucket is at most the scratch's capacity. A captured
              graph serves one bucket.
    how       tile sizes; None: those of this device

    The padding is walked but not read: the AdapterTable has no rows for it. Two launches, no allocation, no host
    synchronisation; the same batch gives the same bits. Raises KernelArgumentError before anything is launched.
    """
    pad = rank_bucket(max_rank)
    launch_decode(ys, x, seg_start, seg_slot, view, xa, pad, pad, how or launch_for("bgmv", x.device))
