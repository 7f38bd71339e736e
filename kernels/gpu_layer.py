"""Triton kernels of `gpu_ops` other than attention: norms, rotary embedding with cache writes, SiLU.

A model's sizes are compile-time constants. Kernels are not specialised on arguments that change while the node serves,
so serving never causes a compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.tiles import narrow

PER_TOKEN = ("positions", "slots")
"""Arguments without a fixed alignment, since they are slices of the buffer that is uploaded for each pass.

Kernels must not be specialised on their alignment, or they would have to be compiled again for some sizes of a batch.
"""


@triton.jit
def unit_rms(x, eps, WIDTH: tl.constexpr):
    """Returns x [rows, columns] divided by each row's root mean square, in fp32.

    Columns of x from WIDTH on must be 0.
    """
    wide = x.to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]


@triton.jit
def add_rms_norm(x, x_stride, residual, weight, out, eps, ADDS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Normalises one token: out = weight * x / rms(x).

    With ADDS it first computes residual += x, and then normalises `residual` instead of x.
    """
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)[None, :]
    inside = k < WIDTH
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + t * x_stride + k, mask=inside, other=0.0)
    if ADDS:
        before = tl.load(residual + t * WIDTH + k, mask=inside, other=0.0)
        value = narrow(before.to(tl.float32) + value.to(tl.float32), dtype)
        tl.store(residual + t * WIDTH + k, value, mask=inside)
    unit = narrow(unit_rms(value, eps, WIDTH), dtype).to(tl.float32)
    factor = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * WIDTH + k, narrow(factor * unit, dtype), mask=inside)


@triton.jit
def silu_mul(gate_up, stride, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Computes silu(gate) * up for BLOCK columns of one token."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.load(gate_up + t * stride + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * stride + WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    power = tl.exp(-tl.abs(gate))  # at most 1 for any gate: no overflow
    silu = narrow(gate * tl.where(gate < 0.0, power, 1.0) / (1.0 + power), dtype).to(tl.float32)
    tl.store(out + t * WIDTH + k, narrow(silu * up, dtype), mask=k < WIDTH)


@triton.jit
def load_rotated(at, mask, c, s, weight, eps, NORMED: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr):
    """Returns the (lower, upper) halves [BH, BD] of the rotated heads at the pointers `at`.

    With NORMED the heads are normalised first. Each product and each sum is rounded to the heads' dtype.
    """
    dtype: tl.constexpr = at.dtype.element_ty
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        d = tl.arange(0, BD)
        w_low = tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        w_high = tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        low = narrow(w_low * narrow(low * factor, dtype).to(tl.float32), dtype).to(tl.float32)
        high = narrow(w_high * narrow(high * factor, dtype).to(tl.float32), dtype).to(tl.float32)
    low_cos = narrow(low * c, dtype).to(tl.float32)
    low_sin = narrow(low * s, dtype).to(tl.float32)
    high_cos = narrow(high * c, dtype).to(tl.float32)
    high_sin = narrow(high * s, dtype).to(tl.float32)
    return narrow(low_cos - high_sin, dtype), narrow(high_cos + low_sin, dtype)


@triton.jit(do_not_specialize_on_alignment=PER_TOKEN)
def rotate_and_store(
    qkv, qkv_stride, cos, sin, positions, slots, keys, values, q_norm, k_norm, eps,
    NORMED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Rotates BH heads of one token.

    Heads of q are rotated in place. Heads of k are written to the cache, together with the same heads of v.
    """
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = qkv + t * qkv_stride
    d = tl.arange(0, BD)
    angle = tl.load(positions + t) * HALF + d
    c = tl.load(cos + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    q_blocks: tl.constexpr = (HEADS + BH - 1) // BH
    if block < q_blocks:
        h = block * BH + tl.arange(0, BH)
        at = row + h[:, None] * (2 * HALF) + d[None, :]
        mask = (h < HEADS)[:, None] & (d < HALF)[None, :]
        low, high = load_rotated(at, mask, c, s, q_norm, eps, NORMED, HALF, BD)
        tl.store(at, low, mask=mask)
        tl.store(at + HALF, high, mask=mask)
    else:
        slot = tl.load(slots + t)
        if slot >= 0:
            h = (block - q_blocks) * BH + tl.arange(0, BH)
            mask = (h < KV_HEADS)[:, None] & (d < HALF)[None, :]
            at = row + (HEADS + h)[:, None] * (2 * HALF) + d[None, :]
            low, high = load_rotated(at, mask, c, s, k_norm, eps, NORMED, HALF, BD)
            to = (slot * KV_HEADS + h)[:, None] * (2 * HALF) + d[None, :]
            tl.store(keys + to, low, mask=mask)
            tl.store(keys + to + HALF, high, mask=mask)
            value = at + KV_HEADS * (2 * HALF)
            tl.store(values + to, tl.load(value, mask=mask), mask=mask)
            tl.store(values + to + HALF, tl.load(value + HALF, mask=mask), mask=mask)
