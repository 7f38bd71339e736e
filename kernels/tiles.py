"""The tiles that the Triton kernels here are made of. Weights are read through the AdapterTable's row offsets.

Masks are always on: no width, rank or segment is a whole number of tiles, and what lies beside them may be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Triton's interpreter multiplies bf16 as if its bits were integers, and cuts bits off where a GPU rounds."""


@triton.jit
def dot(a, b, acc):
    """Returns acc + a @ b, accumulated in fp32; fp32 operands keep all their bits."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """Returns the fp32 value in the weights' dtype, rounded to the nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        value = tl.where(value == value, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), value)
    return value.to(dtype)


@triton.jit
def find_tile(tile, seg_start, segments, BT: tl.constexpr):
    """Returns (segment, first token) of the tile-th tile when every segment is cut into tiles of its own; segment ==
    segments when there are fewer tiles than that. Segments are looked at 32 at a time, so none of their numbers has a
    kernel of its own."""
    segment = segments
    first = 0
    before = 0
    for s0 in range(0, segments, 32):
        s = s0 + tl.arange(0, 32)
        begins = tl.load(seg_start + s, mask=s < segments, other=0)
        ends = tl.load(seg_start + s + 1, mask=s < segments, other=0)
        tiles = (ends - begins + BT - 1) // BT
        upto = before + tl.cumsum(tiles, 0)
        mine = (upto - tiles <= tile) & (tile < upto)
        segment += tl.sum(tl.where(mine, s - segments, 0), 0)
        first += tl.sum(tl.where(mine, begins + (tile - upto + tiles) * BT, 0), 0)
        before += tl.sum(tiles, 0)
    return segment, first


@triton.jit
def pad_units(units, row_offset, first, j, rank, width, pool_units, UNIT: tl.constexpr):
    """Returns `units`, where an adapter's rows j begin, with rows from `rank` on those of whoever lies behind its first
    row in the pool, whose end goes over into its beginning."""
    row_units = tl.cdiv(width, UNIT)
    behind = (tl.load(row_offset + first) + j * row_units) % (pool_units - row_units + 1)
    return tl.where(j < rank, units, behind)


@triton.jit
def shrink_tile(
    x, x_stride, t0, end, pool, row_offset, a_first, j0, rank, bound, pool_units, k0, k_step, d_in,
    PADDED: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Returns f32[BT, BR]: x[t0:end] @ A[j0:bound]^T over the columns k0, k0 + k_step, ... (blocks of BK). A's rows
    from `rank` on are read where PADDED, and are 0."""
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
    """Stores xa[split, p, t0:end, j0:rank] = acc. A rank above the scratch's capacity is cut, never written past it."""
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
    """Adds y[t0:end, n] += scale * (sum of xa over its splits, in order) @ B[:bound, n]; B's rows from `rank` on are
    read where PADDED, and are 0."""
    t = t0 + tl.arange(0, BT)
    known = tl.minimum(rank, capacity)
    acc = tl.zeros((BT, n.shape[0]), dtype=tl.float32)
    for j0 in range(0, bound, BR):
        j = j0 + tl.arange(0, BR)
        part = tl.zeros((BT, BR), dtype=tl.float32)
        for split in range(SPLITS):
            rows = xa + ((split * projections + p) * tokens + t).to(tl.int64) * capacity
            part += tl.load(rows[:, None] + j[None, :], mask=(t < end)[:, None] & (j < known)[None, :], other=0.0)
        units = tl.load(row_offset + b_first + j, mask=j < known, other=0)
        stored = j < known
        if PADDED:
            units = pad_units(units, row_offset, b_first, j, known, d_out, pool_units, UNIT)
            stored = j < bound
        rows = pool + units.to(tl.int64) * UNIT
        w = tl.load(rows[:, None] + n[None, :], mask=stored[:, None] & (n < d_out)[None, :], other=0.0)
        if PADDED:
            w = tl.where((j < known)[:, None], w, 0.0)
        acc = dot(narrow(part, w.dtype), w, acc)
    at = y + t.to(tl.int64)[:, None] * y_stride + n[None, :]
    mask = (t < end)[:, None] & (n < d_out)[None, :]
    before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, narrow(before + scale * acc, y.dtype.element_ty), mask=mask)


@triton.jit
def choose_output(block, y0, y1, y2, s0, s1, s2, d0, d1, d2, BN: tl.constexpr):
    """Returns which projection a column block of the group is in: (projection, its y, stride, width, first column)."""
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
