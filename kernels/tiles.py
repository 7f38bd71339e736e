"""Tile functions of the Triton kernels. Weights are read through the AdapterTable's row offsets.

All accesses are masked: widths, ranks and segments need not be multiples of a tile, and memory next to them may be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""True in Triton's interpreter. `dot` and `narrow` compensate for errors of the interpreter.

The interpreter multiplies bf16 bits as integers, and truncates where a GPU rounds.
"""


@triton.jit
def dot(a, b, acc):
    """Returns acc + a @ b, accumulated in fp32; fp32 operands are not rounded to tf32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """Returns fp32 values converted to `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), value)
    return value.to(dtype)


@triton.jit
def find_tile(tile, seg_start, segments, BT: tl.constexpr):
    """Returns (segment, first token) of tile number `tile`. Tiles have BT tokens, and each segment begins a new tile.

    If there are no more than `tile` tiles, the returned segment is `segments`, the number of segments. Segments are
    loaded 32 at a time, so that one kernel serves any number of them.
    """
    segment = segments
    first = 0
    before = 0
    for s0 in range(0, segments, 32):
        s = s0 + tl.arange(0, 32)
        begins = tl.load(seg_start + s, mask=s < segments, other=0)
        ends = tl.load(seg_start + s + 1, mask=s < segments, other=0)
        tiles = (ends - begins + BT - 1) // BT
        upto = before + tl.cumsum(tiles, 0)
        is_inside = (upto - tiles <= tile) & (tile < upto)
        segment += tl.sum(tl.where(is_inside, s - segments, 0), 0)
        first += tl.sum(tl.where(is_inside, begins + (tile - upto + tiles) * BT, 0), 0)
        before += tl.sum(tiles, 0)
    return segment, first


@triton.jit
def pad_units(units, row_offset, first, j, rank, width, pool_units, UNIT: tl.constexpr):
    """Returns the offsets of an adapter's rows j: `units` for rows j < rank, and replacements for padding rows.

    The replacements are offsets of the memory that follows the adapter's first row in the pool, whatever it contains.
    At the end of the pool they continue at its beginning.
    """
    row_units = tl.cdiv(width, UNIT)
    padding = (tl.load(row_offset + first) + j * row_units) % (pool_units - row_units + 1)
    return tl.where(j < rank, units, padding)


@triton.jit
def shrink_tile(
    x, x_stride, t0, end, pool, row_offset, a_first, j0, rank, bound, pool_units, k0, k_step, d_in,
    PADDED: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Returns f32[BT, BR]: x[t0:end] @ A[j0:bound]^T over the column blocks of BK at k0, k0 + k_step, ...

    Rows of A from `rank` on count as 0. With PADDED the kernel reads memory for these rows too, and ignores the values.
    """
    t = t0 + tl.arange(0, BT)
    j = j0 + tl.arange(0, BR)
    units = tl.load(row_offset + a_first + j, mask=j < rank, other=0)
    if PADDED:
        units = pad_units(units, row_offset, a_first, j, rank, d_in, pool_units, UNIT)
    rows = pool + units.to(tl.int64) * UNIT
    xs = x + t.to(tl.int64) * x_stride
    acc = tl.zeros((BT, BR), dtype=tl.float32)
    for at in range(k0, d_in, k_step):
        k = at + tl.arange(0, BK)
        w = tl.load(rows[None, :] + k[:, None], mask=(k < d_in)[:, None] & (j < bound)[None, :], other=0.0)
        if PADDED:
            w = tl.where((j < rank)[None, :], w, 0.0)
        xt = tl.load(xs[:, None] + k[None, :], mask=(t < end)[:, None] & (k < d_in)[None, :], other=0.0)
        acc = dot(xt, w, acc)
    return acc


@triton.jit
def store_xa(acc, xa, split, p, projections, tokens, capacity, t0, end, j0, rank, BT: tl.constexpr, BR: tl.constexpr):
    """Stores xa[split, p, t0:end, j0:rank] = acc. Ranks >= `capacity`, the scratch's size, are not written."""
    t = t0 + tl.arange(0, BT)
    j = j0 + tl.arange(0, BR)
    rows = xa + ((split * projections + p) * tokens + t).to(tl.int64) * capacity
    tl.store(rows[:, None] + j[None, :], acc, mask=(t < end)[:, None] & (j < tl.minimum(rank, capacity))[None, :])


@triton.jit
def expand_tile(
    xa, p, projections, tokens, capacity, y, y_stride, t0, end, n, d_out, pool, row_offset, b_first, rank, bound,
    pool_units, scale,
    PADDED: tl.constexpr, UNIT: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Computes y[t0:end, n] += scale * xa @ B[:bound, n], with xa summed over its splits in order.

    Rows of B from `rank` on count as 0. With PADDED the kernel reads memory for these rows too, and ignores the values.
    """
    t = t0 + tl.arange(0, BT)
    stored_rank = tl.minimum(rank, capacity)
    acc = tl.zeros((BT, n.shape[0]), dtype=tl.float32)
    for j0 in range(0, bound, BR):
        j = j0 + tl.arange(0, BR)
        part = tl.zeros((BT, BR), dtype=tl.float32)
        for split in range(SPLITS):
            rows = xa + ((split * projections + p) * tokens + t).to(tl.int64) * capacity
            part += tl.load(rows[:, None] + j[None, :], mask=(t < end)[:, None] & (j < stored_rank)[None, :], other=0.0)
        units = tl.load(row_offset + b_first + j, mask=j < stored_rank, other=0)
        is_read = j < stored_rank
        if PADDED:
            units = pad_units(units, row_offset, b_first, j, stored_rank, d_out, pool_units, UNIT)
            is_read = j < bound
        rows = pool + units.to(tl.int64) * UNIT
        w = tl.load(rows[:, None] + n[None, :], mask=is_read[:, None] & (n < d_out)[None, :], other=0.0)
        if PADDED:
            w = tl.where((j < stored_rank)[:, None], w, 0.0)
        acc = dot(narrow(part, w.dtype), w, acc)
    at = y + t.to(tl.int64)[:, None] * y_stride + n[None, :]
    mask = (t < end)[:, None] & (n < d_out)[None, :]
    before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, narrow(before + scale * acc, y.dtype.element_ty), mask=mask)


@triton.jit
def choose_output(block, y0, y1, y2, s0, s1, s2, d0, d1, d2, BN: tl.constexpr):
    """Returns (projection, y, stride, width, first column) of the column block number `block` of the group."""
    n0 = tl.cdiv(d0, BN)
    n1 = tl.cdiv(d1, BN)
    p = 0
    y = y0
    stride = s0
    width = d0
    column = block * BN
    if block >= n0 + n1:
        p = 2
        y = y2
        stride = s2
        width = d2
        column = (block - n0 - n1) * BN
    elif block >= n0:
        p = 1
        y = y1
        stride = s1
        width = d1
        column = (block - n0) * BN
    return p, y, stride, width, column
