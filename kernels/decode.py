"""LoRA for decode rows in Triton, with one program per segment, projection and slice.

A program loops over its segment's tokens. A segment's weights are read from memory once per launch; token tiles after
the first read them from the GPU's cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.launch import UNALIGNED, Launch, launch_for, launch_pair
from kernels.tiles import choose_output, expand_tile, shrink_tile, store_xa
from kernels.view import LoraCall


@triton.jit
def largest_rank(rank, seg_slot, p, table_stride):
    """Returns the largest rank of projection p among the batch's adapters."""
    segments = tl.num_programs(0)
    largest = 0
    for s0 in range(0, segments, 32):
        s = s0 + tl.arange(0, 32)
        slot = tl.load(seg_slot + s, mask=s < segments, other=-1)
        ranks = tl.load(rank + slot * table_stride + p, mask=slot >= 0, other=0)
        largest = tl.maximum(largest, tl.max(ranks, 0))
    return largest


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def decode_shrink(
    x, x_stride, xa, seg_start, seg_slot, pool, rank, first, row_offset, table_stride,
    projections, tokens, capacity, d_in, pool_units,
    PADDED: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, RANK_PROGRAMS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes xa[split, p, t, j] for one segment and projection, over some ranks j and some input columns."""
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
    if PADDED:
        bound = largest_rank(rank, seg_slot, p, table_stride)
    for j0 in range(part * BR, bound, RANK_PROGRAMS * BR):
        for t0 in range(begin, end, BT):
            acc = shrink_tile(
                x, x_stride, t0, end, pool, row_offset, a_first, j0, r, bound, pool_units, split * BK, SPLITS * BK,
                d_in, PADDED, UNIT, BT, BR, BK,
            )  # fmt: skip
            store_xa(acc, xa, split, p, projections, tokens, capacity, t0, end, j0, r, BT, BR)


@triton.jit(do_not_specialize_on_alignment=UNALIGNED)
def decode_expand(
    xa, y0, y1, y2, s0, s1, s2, d0, d1, d2, seg_start, seg_slot, pool, rank, scale, first, row_offset, table_stride,
    projections, tokens, capacity, pool_units,
    PADDED: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds one segment's LoRA to BN columns of one output."""
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
    if PADDED:
        bound = largest_rank(rank, seg_slot, p, table_stride)
    for t0 in range(begin, end, BT):
        expand_tile(
            xa, p, projections, tokens, capacity, y, y_stride, t0, end, n, d_out, pool, row_offset, b_first, r, bound,
            pool_units, factor, PADDED, UNIT, SPLITS, BT, BR,
        )  # fmt: skip


def mbgmv(call: LoraCall, sizes: Launch | None = None) -> None:
    """Adds LoRA to each output p: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for each token t.

    s is the slot of the adapter of token t; A_sp and B_sp are this adapter's matrices for projection p. Each adapter is
    computed at its rank, so the cost grows with the sum of the rows' ranks. Sums are fp32. `sizes` are the tile sizes;
    None selects those of this device. The call makes two launches, without allocation or host synchronisation; ranks
    are read on the device. The same batch gives the same bits. Raises KernelArgumentError before the first launch.
    """
    _launch(call, False, sizes or launch_for("mbgmv", call.x.device))


def bgmv(call: LoraCall, sizes: Launch | None = None) -> None:
    """Adds LoRA as Punica's BGMV does, with all adapters padded to the batch's largest rank.

    It computes what `mbgmv` computes. The cost grows with rows x largest rank, as in Punica (Chen et al. 2023), which
    stores padded weights. The AdapterTable stores no padding. To have the same memory traffic, the kernel reads other
    rows of the pool where padding would be, and replaces their values by zeros. The largest rank of each projection is
    determined on the device, so a captured graph serves any ranks.

    The call makes two launches, without allocation or host synchronisation. The same batch gives the same bits. Raises
    KernelArgumentError before the first launch.
    """
    _launch(call, True, sizes or launch_for("bgmv", call.x.device))


def _launch(call: LoraCall, padded: bool, sizes: Launch) -> None:
    """Launches shrink and expand, on grids that depend on shapes alone.

    `padded` pads all adapters to the batch's largest rank.
    """
    units = call.view.pool.shape[0] // call.view.unit
    launch_pair((decode_shrink, decode_expand), call.seg_slot.shape[0], call, sizes, pool_units=units, PADDED=padded)
