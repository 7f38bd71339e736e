"""Prefill: segments of any length, in tiles of tokens for tensor cores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.launch import TABLE_VIEWS, Launch, launch_for, launch_pair
from kernels.tiles import choose_output, expand_tile, shrink_tile, store_xa
from kernels.view import GroupView

LEAST_SEGMENTS = 32
"""Batches of so many segments share one compiled kernel; each doubling above has its own."""


@triton.jit
def find_tile(tile, seg_start, segments, BS: tl.constexpr, BT: tl.constexpr):
    """(segment, first token) of the tile-th tile when every segment is cut into tiles of its own; segment == segments
    when there are fewer tiles than that."""
    s = tl.arange(0, BS)
    begins = tl.load(seg_start + s, mask=s < segments, other=0)
    ends = tl.load(seg_start + s + 1, mask=s < segments, other=0)
    tiles = (ends - begins + BT - 1) // BT
    before = tl.cumsum(tiles, 0) - tiles
    segment = tl.sum(((before + tiles <= tile) & (s < segments)).to(tl.int32), 0)
    inside = tile - tl.sum(tl.where(s == segment, before, 0), 0)
    return segment, tl.sum(tl.where(s == segment, begins, 0), 0) + inside * BT


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=TABLE_VIEWS)
def sgmv_shrink(
    x, x_stride, xa, seg_start, seg_slot, pool, rank, first, row_offset, table_stride,
    projections, tokens, capacity, d_in, segments,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, RANK_PROGRAMS: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """xa[split, p, t, j] for one tile of tokens, projection, part of the ranks and part of the input columns."""
    segment, t0 = find_tile(tl.program_id(0), seg_start, segments, BS, BT)
    if segment >= segments:
        return
    p = tl.program_id(1) // RANK_PROGRAMS
    part = tl.program_id(1) % RANK_PROGRAMS
    split = tl.program_id(2)
    slot = tl.load(seg_slot + segment)
    if slot < 0:
        return
    r = tl.load(rank + slot * table_stride + p)
    end = tl.load(seg_start + segment + 1)
    a_first = tl.load(first + (slot * table_stride + p) * 2)
    for j0 in range(part * BR, r, RANK_PROGRAMS * BR):
        acc = shrink_tile(
            x, x_stride, t0, end, pool, row_offset, a_first, j0, r, split * BK, SPLITS * BK, d_in, UNIT, BT, BR, BK
        )
        store_xa(acc, xa, split, p, projections, tokens, capacity, t0, end, j0, r, BT, BR)


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=TABLE_VIEWS)
def sgmv_expand(
    xa, y0, y1, y2, s0, s1, s2, d0, d1, d2, seg_start, seg_slot, pool, rank, scale, first, row_offset,
    table_stride, projections, tokens, capacity, segments,
    UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BS: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds one tile's part to BN columns of one output."""
    segment, t0 = find_tile(tl.program_id(0), seg_start, segments, BS, BT)
    if segment >= segments:
        return
    slot = tl.load(seg_slot + segment)
    if slot < 0:
        return
    p, y, y_stride, d_out, column = choose_output(tl.program_id(1), y0, y1, y2, s0, s1, s2, d0, d1, d2, BN)
    r = tl.load(rank + slot * table_stride + p)
    if r == 0:
        return
    end = tl.load(seg_start + segment + 1)
    b_first = tl.load(first + (slot * table_stride + p) * 2 + 1)
    factor = tl.load(scale + slot * table_stride + p)
    n = column + tl.arange(0, BN)
    expand_tile(
        xa, p, projections, tokens, capacity, y, y_stride, t0, end, n, d_out, pool, row_offset, b_first, r, r, factor,
        UNIT, SPLITS, BT, BR,
    )  # fmt: skip


def sgmv(
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
    seg_start i32[S + 1]: first token of each segment, and the end of the last; segments may be empty
    seg_slot  i32[S], -1 = base
    view      the group's part of the AdapterTable; its dtype (fp32, fp16, bf16) is that of x and ys
    xa        f32[>= splits, >= P, >= T, capacity], scratch, in place
    max_rank  the batch's largest rank, or a bound on it, as the host knows it: at most the scratch's capacity
    how       tile sizes; None: those of this device

    xA is rounded to the weights' dtype before the second product, as tensor cores want it. Two launches of as many
    tiles as T tokens in S segments can have at most; no allocation, no host synchronisation; the same batch gives
    the same bits. Raises KernelArgumentError before anything is launched.
    """
    how = how or launch_for("sgmv", x.device)
    segments = seg_slot.shape[0]
    tiles = -(-x.shape[0] // how.tokens) + segments
    pair, block = (sgmv_shrink, sgmv_expand), max(LEAST_SEGMENTS, triton.next_power_of_2(max(1, segments)))
    launch_pair(pair, tiles, ys, x, seg_start, seg_slot, view, xa, max_rank, how, segments=segments, BS=block)
