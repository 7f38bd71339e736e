"""The kernels behind `bgmv` and `mbgmv`: one program per segment, projection and slice; tokens walked inside it.

A segment's weights come from memory once per launch; tokens above a tile read them again from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, column_blocks, three
from kernels.tiles import choose_output, expand_tile, shrink_tile, store_xa
from kernels.view import GroupView, check_call


@triton.jit
def decode_shrink(
    x, x_stride, xa, seg_start, seg_slot, pool, rank, first, row_offset, table_stride,
    projections, tokens, capacity, d_in,
    PAD: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, RANK_PROGRAMS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """xa[split, p, t, j] for one segment, projection, part of its ranks and part of its input columns."""
    segment = tl.program_id(0)
    p = tl.program_id(1) // RANK_PROGRAMS
    part = tl.program_id(1) % RANK_PROGRAMS
    split = tl.program_id(2)
    slot = tl.load(seg_slot + segment)
    if slot < 0:
        return
    r = tl.load(rank + slot * table_stride + p)
    if r == 0:
        return
    begin = tl.load(seg_start + segment)
    end = tl.load(seg_start + segment + 1)
    a_first = tl.load(first + (slot * table_stride + p) * 2)
    bound = r
    if PAD > 0:
        bound = PAD
    for j0 in range(part * BR, bound, RANK_PROGRAMS * BR):
        for t0 in range(begin, end, BT):
            acc = shrink_tile(
                x, x_stride, t0, end, pool, row_offset, a_first, j0, r, split * BK, SPLITS * BK, d_in, UNIT, BT, BR, BK
            )
            store_xa(acc, xa, split, p, projections, tokens, capacity, t0, end, j0, r, BT, BR)


@triton.jit
def decode_expand(
    xa, y0, y1, y2, s0, s1, s2, d0, d1, d2, seg_start, seg_slot, pool, rank, scale, first, row_offset, table_stride,
    projections, tokens, capacity,
    PAD: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds one segment's part to BN columns of one output."""
    segment = tl.program_id(0)
    slot = tl.load(seg_slot + segment)
    if slot < 0:
        return
    p, y, y_stride, d_out, column = choose_output(tl.program_id(1), y0, y1, y2, s0, s1, s2, d0, d1, d2, BN)
    r = tl.load(rank + slot * table_stride + p)
    if r == 0:
        return
    begin = tl.load(seg_start + segment)
    end = tl.load(seg_start + segment + 1)
    b_first = tl.load(first + (slot * table_stride + p) * 2 + 1)
    factor = tl.load(scale + slot * table_stride + p)
    n = column + tl.arange(0, BN)
    bound = r
    if PAD > 0:
        bound = PAD
    for t0 in range(begin, end, BT):
        expand_tile(
            xa, p, projections, tokens, capacity, y, y_stride, t0, end, n, d_out, pool, row_offset, b_first, r, bound,
            factor, UNIT, SPLITS, BT, BR,
        )  # fmt: skip


def launch_decode(
    ys: Sequence[torch.Tensor],
    x: torch.Tensor,
    seg_start: torch.Tensor,
    seg_slot: torch.Tensor,
    view: GroupView,
    xa: torch.Tensor,
    pad: int,
    how: Launch,
) -> None:
    """Two launches. Grids depend on shapes alone. `pad` 0: each adapter's own rank."""
    check_call(ys, x, seg_start, seg_slot, view, xa, how.splits)
    segments, projections = seg_slot.shape[0], view.projections
    if not segments or not x.shape[0]:
        return
    sizes = (xa.shape[1], xa.shape[2], xa.shape[3])
    stride = view.rank.stride(0)
    decode_shrink[(segments, projections * how.rank_programs, how.splits)](
        x, x.stride(0), xa, seg_start, seg_slot, view.pool, view.rank, view.first, view.row_offset, stride,
        *sizes, x.shape[1],
        PAD=pad, UNIT=view.unit, SPLITS=how.splits, RANK_PROGRAMS=how.rank_programs,
        BT=how.tokens, BR=how.ranks, BK=how.shrink_width, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    widths = [y.shape[1] for y in ys]
    decode_expand[(segments, column_blocks(widths, how.expand_width))](
        xa, *three(ys, ys[0]), *three([y.stride(0) for y in ys], 0), *three(widths, 0),
        seg_start, seg_slot, view.pool, view.rank, view.scale, view.first, view.row_offset, stride, *sizes,
        PAD=pad, UNIT=view.unit, SPLITS=how.splits,
        BT=how.tokens, BR=how.ranks, BN=how.expand_width, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
