"""Decode rows: one program per segment, projection and slice; tokens are walked inside it.

A segment's weights come from memory once per launch; tokens above a tile read them again from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.launch import UNALIGNED, Launch, launch_for, launch_pair
from kernels.tiles import choose_output, expand_tile, shrink_tile, store_xa
from kernels.view import LoraCall


@triton.jit
def largest_rank(rank, seg_slot, p, table_stride):
    """Returns the largest rank in the batch for projection p."""
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
    """Computes xa[split, p, t, j] for one segment, projection, part of its ranks and part of its input columns."""
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
    if PADDED:
        bound = largest_rank(rank, seg_slot, p, table_stride)
    for t0 in range(begin, end, BT):
        expand_tile(
            xa, p, projections, tokens, capacity, y, y_stride, t0, end, n, d_out, pool, row_offset, b_first, r, bound,
            pool_units, factor, PADDED, UNIT, SPLITS, BT, BR,
        )  # fmt: skip


def mbgmv(call: LoraCall, how: Launch | None = None) -> None:
    """Adds the adapters' part: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for every segment's tokens t and its
    slot s, fp32 accumulation. `how`: tile sizes; None: those of this device.

    Two launches, no allocation, no host synchronisation; ranks are read on the device. The same batch gives the same
    bits. Raises KernelArgumentError before anything is launched.
    """
    _launch(call, False, how or launch_for("mbgmv", call.x.device))


def bgmv(call: LoraCall, how: Launch | None = None) -> None:
    """Adds the adapters' part: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp, with A_sp and B_sp padded by zero rows
    to the largest rank that the batch's slots have for projection p. `how`: tile sizes; None: those of this device.

    Padding costs what it costs Punica (Chen et al. 2023), whose weights are stored with it: the AdapterTable has no
    such rows, so what lies behind an adapter's first row is read in their place, and set to zero. The largest rank is
    found on the device: a captured graph serves any ranks. Two launches, no allocation, no host synchronisation; the
    same batch gives the same bits. Raises KernelArgumentError before anything is launched.
    """
    _launch(call, True, how or launch_for("bgmv", call.x.device))


def _launch(call: LoraCall, padded: bool, how: Launch) -> None:
    """Launches shrink and expand for decode rows: two launches. Grids depend on shapes alone. `padded`: to the batch's
    largest rank; else each adapter's own."""
    units = call.view.pool.shape[0] // call.view.unit
    launch_pair((decode_shrink, decode_expand), call.seg_slot.shape[0], call, how, pool_units=units, PADDED=padded)
