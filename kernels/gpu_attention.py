"""The Triton kernels of attention over the paged cache: nothing of a context is copied.

Both walk a context in tiles of BN positions with a running maximum and sum (FlashAttention; Dao et al. 2022). Decode
splits a row's context over programs and adds the parts up in a second launch (Flash-Decoding), and has the query heads
that share a key head as the rows of one product. Scores are powers of two: `scaling` has log2(e) in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.tiles import dot, find_tile, narrow

TABLES = ("context_len", "block_table", "query_start")
"""Arguments that begin anywhere in a step's upload: a kernel compiled for their alignment would serve some buckets."""


@triton.jit
def load_places(block_table, row, table_stride, p, end, BLOCK_TOKENS: tl.constexpr):
    """Returns i64: the cache slots of positions p of a row; positions from `end` on are in slot 0."""
    inside = p < end
    block = tl.load(block_table + row.to(tl.int64) * table_stride + p // BLOCK_TOKENS, mask=inside, other=0)
    return tl.where(inside, block.to(tl.int64) * BLOCK_TOKENS + p % BLOCK_TOKENS, 0)


@triton.jit
def load_heads(cache, slot, head, inside, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr):
    """Returns [positions, BD]: one head of each slot, 0 where not inside."""
    d = tl.arange(0, BD)
    at = cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :]
    return tl.load(at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def add_tile(scores, v, most, total, acc):
    """Returns (maximum, sum, weighted values) with one more tile: scores [rows, BN], v [BN, BD]."""
    new = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(most - base)
    acc = dot(narrow(weights, v.dtype), v, acc * kept[:, None])
    return new, total * kept + tl.sum(weights, 1), acc


@triton.jit
def cut(context, splits, WINDOW: tl.constexpr, LEAST: tl.constexpr, BN: tl.constexpr):
    """Returns (first position that is seen, positions of a piece) of a row with this context."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    piece = tl.cdiv(tl.cdiv(context - first, splits), BN) * BN
    return first, tl.maximum(piece, LEAST)


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=TABLES)
def decode_attention(
    q, q_stride, keys, values, context_len, block_table, table_stride, out, scratch, splits, scaling,
    WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    LEAST: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Attends for one row, key head and piece of the context: into `out` with one split, else into the scratch."""
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_len + row)
    first, piece = cut(context, splits, WINDOW, LEAST, BN)
    begin = first + split * piece
    end = tl.minimum(begin + piece, context)
    if begin >= end:
        return
    g = tl.arange(0, BG)
    d = tl.arange(0, BD)
    head = kv * GROUP + g
    mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + row.to(tl.int64) * q_stride + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    most = tl.full((BG,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BG,), dtype=tl.float32)
    acc = tl.zeros((BG, BD), dtype=tl.float32)
    for at in range(begin, end, BN):
        p = at + tl.arange(0, BN)
        slot = load_places(block_table, row, table_stride, p, end, BLOCK_TOKENS)
        k = load_heads(keys, slot, kv, p < end, KV_HEADS, DIM, BD)
        scores = dot(query, tl.trans(k), tl.zeros((BG, BN), dtype=tl.float32)) * scaling
        scores = tl.where((p < end)[None, :], scores, float("-inf"))
        v = load_heads(values, slot, kv, p < end, KV_HEADS, DIM, BD)
        most, total, acc = add_tile(scores, v, most, total, acc)
    heads: tl.constexpr = KV_HEADS * GROUP
    if splits == 1:
        to = out + (row.to(tl.int64) * heads + head[:, None]) * DIM + d[None, :]
        tl.store(to, narrow(acc / total[:, None], out.dtype.element_ty), mask=mask)
    else:
        part = scratch + ((split * tl.num_programs(0) + row).to(tl.int64) * heads + head) * (DIM + 2)
        tl.store(part[:, None] + d[None, :], acc, mask=mask)
        tl.store(part + DIM, most, mask=g < GROUP)
        tl.store(part + DIM + 1, total, mask=g < GROUP)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=TABLES)
def combine_splits(
    scratch, context_len, out, splits,
    WINDOW: tl.constexpr, DIM: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Combines, for one head of one row, the at most MOST pieces that decode_attention left."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.load(context_len + row)
    if context == 0:
        return
    first, piece = cut(context, splits, WINDOW, LEAST, BN)
    split = tl.arange(0, MOST)
    d = tl.arange(0, BD)
    there = (first + split * piece < context) & (split < splits)
    rows, heads = tl.num_programs(0), tl.num_programs(1)
    part = scratch + ((split * rows + row).to(tl.int64) * heads + head) * (DIM + 2)
    most = tl.load(part + DIM, mask=there, other=float("-inf"))
    factor = tl.where(there, tl.exp2(most - tl.max(most, 0)), 0.0)
    total = tl.sum(factor * tl.load(part + DIM + 1, mask=there, other=0.0), 0)
    acc = tl.load(part[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    found = tl.sum(acc * factor[:, None], 0) / total
    tl.store(out + (row.to(tl.int64) * heads + head) * DIM + d, narrow(found, out.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["rows", "table_stride"], do_not_specialize_on_alignment=TABLES)
def prefill_attention(
    q, q_stride, keys, values, query_start, context_len, block_table, rows, table_stride, out, scaling,
    WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Attends for one head of one tile of a row's tokens."""
    row, t0 = find_tile(tl.program_id(0), query_start, rows, BT)
    if row >= rows:
        return
    context = tl.load(context_len + row)
    if context == 0:
        return
    head = tl.program_id(1)
    end = tl.load(query_start + row + 1)
    d = tl.arange(0, BD)
    t = t0 + tl.arange(0, BT)
    mask = (t < end)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + t.to(tl.int64)[:, None] * q_stride + head * DIM + d[None, :], mask=mask, other=0.0)
    position = tl.minimum(context - end + t, context - 1)  # behind the last token as the last: nobody sees nothing
    last = tl.minimum(context - end + t0 + BT, context)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - end + t0 - WINDOW + 1, 0)
    most = tl.full((BT,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BT,), dtype=tl.float32)
    acc = tl.zeros((BT, BD), dtype=tl.float32)
    for at in range(first, last, BN):
        p = at + tl.arange(0, BN)
        slot = load_places(block_table, row, table_stride, p, last, BLOCK_TOKENS)
        k = load_heads(keys, slot, head // GROUP, p < last, KV_HEADS, DIM, BD)
        scores = dot(query, tl.trans(k), tl.zeros((BT, BN), dtype=tl.float32)) * scaling
        seen = (p[None, :] <= position[:, None]) & (p < last)[None, :]
        if WINDOW > 0:
            seen &= p[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        v = load_heads(values, slot, head // GROUP, p < last, KV_HEADS, DIM, BD)
        most, total, acc = add_tile(scores, v, most, total, acc)
    to = out + t.to(tl.int64)[:, None] * (KV_HEADS * GROUP * DIM) + head * DIM + d[None, :]
    tl.store(to, narrow(acc / total[:, None], out.dtype.element_ty), mask=mask)
