"""LoRA for prompts in Triton. Segments of any length are divided into tiles of tokens for tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.launch import UNALIGNED, Launch, launch_for, launch_pair
from kernels.tiles import choose_output, expand_tile, find_tile, shrink_tile, store_xa
from kernels.view import LoraCall


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=UNALIGNED)
def sgmv_shrink(
    x, x_stride, xa, seg_start, seg_slot, pool, rank, first, row_offset, table_stride,
    projections, tokens, capacity, d_in, segments,
    UNIT: tl.constexpr, SPLITS: tl.constexpr, RANK_PROGRAMS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes xa[split, p, t, j] for one tile of tokens, one projection, some ranks and some input columns."""
    segment, t0 = find_tile(tl.program_id(0), seg_start, segments, BT)
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
            x, x_stride, t0, end, pool, row_offset, a_first, j0, r, r, 0, split * BK, SPLITS * BK, d_in,
            False, UNIT, BT, BR, BK,
        )  # fmt: skip
        store_xa(acc, xa, split, p, projections, tokens, capacity, t0, end, j0, r, BT, BR)


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=UNALIGNED)
def sgmv_expand(
    xa, y0, y1, y2, s0, s1, s2, d0, d1, d2, seg_start, seg_slot, pool, rank, scale, first, row_offset,
    table_stride, projections, tokens, capacity, segments,
    UNIT: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds LoRA to BN columns of one output, for one tile of tokens."""
    segment, t0 = find_tile(tl.program_id(0), seg_start, segments, BT)
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
        xa, p, projections, tokens, capacity, y, y_stride, t0, end, n, d_out, pool, row_offset, b_first, r, r, 0,
        factor, False, UNIT, SPLITS, BT, BR,
    )  # fmt: skip


def sgmv(call: LoraCall, sizes: Launch | None = None) -> None:
    """Adds LoRA to each output p: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for each token t.

    s is the slot of the adapter of token t; A_sp and B_sp are this adapter's matrices for projection p. Sums are fp32;
    the product of x and A is rounded to the weights' dtype before the second product, for tensor cores. `sizes` are the
    tile sizes; None selects those of this device. The call makes two launches, without allocation or host
    synchronisation. Each launch has the maximum number of tiles that T tokens in S segments can have. The same batch
    gives the same bits. Raises KernelArgumentError before the first launch.
    """
    sizes = sizes or launch_for("sgmv", call.x.device)
    segments = call.seg_slot.shape[0]
    tiles = -(-call.x.shape[0] // sizes.tokens) + segments
    launch_pair((sgmv_shrink, sgmv_expand), tiles, call, sizes, segments=segments)
