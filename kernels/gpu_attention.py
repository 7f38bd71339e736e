"""Triton kernels for attention over the paged KV cache. They read keys and values in place.

Both attention kernels loop over a context in tiles of BN positions with a running maximum and sum (FlashAttention; Dao
et al. 2022). Decode splits a row's context over programs and combines the parts in a second launch (Flash-Decoding).
The query heads that share a key head are the rows of one product. Softmax weights are computed as 2 ** score, since
`scaling` includes log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.tiles import dot, find_tile, narrow

TABLES = ("context_len", "block_table", "query_start")
"""Arguments without a fixed alignment, since they are slices of the buffer that is uploaded for each pass.

Kernels must not be specialised on their alignment, or they would have to be compiled again for some sizes of a batch.
"""


@triton.jit
def load_places(block_table, row, table_stride, p, end, BLOCK_TOKENS: tl.constexpr):
    """Returns the cache slots (i64, shape of p) of the positions p of a row; slot 0 for positions from `end` on."""
    inside = p < end
    block = tl.load(block_table + row.to(tl.int64) * table_stride + p // BLOCK_TOKENS, mask=inside, other=0)
    return tl.where(inside, block.to(tl.int64) * BLOCK_TOKENS + p % BLOCK_TOKENS, 0)


@triton.jit
def load_heads(cache, slot, head, inside, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BD: tl.constexpr):
    """Returns the keys or values of one head, [positions, BD]; 0 where `inside` is False."""
    d = tl.arange(0, BD)
    at = cache + (slot * KV_HEADS + head)[:, None] * DIM + d[None, :]
    return tl.load(at, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def add_tile(scores, v, maximum, total, acc):
    """Returns the updated softmax state (maximum, total, acc) after one more tile.

    The tile has scores [rows, BN] and values v [BN, BD]; acc [rows, BD] is the sum of weighted values.
    """
    new = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # a row without a visible position so far
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(maximum - base)
    acc = dot(narrow(weights, v.dtype), v, acc * rescale[:, None])
    return new, total * rescale + tl.sum(weights, 1), acc


@triton.jit
def cut(context, splits, WINDOW: tl.constexpr, MIN_PIECE: tl.constexpr, BN: tl.constexpr):
    """Returns (first visible position, positions per split) of a row with `context` tokens."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0)
    piece = tl.cdiv(tl.cdiv(context - first, splits), BN) * BN
    return first, tl.maximum(piece, MIN_PIECE)


@triton.jit(do_not_specialize=["table_stride", "splits"], do_not_specialize_on_alignment=TABLES)
def decode_attention(
    q, q_stride, keys, values, context_len, block_table, table_stride, out, scratch, splits, scaling,
    WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    MIN_PIECE: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Computes attention for one row, one key head and one split of the context.

    Writes to `out` if there is one split, else partial results to `scratch`.
    """
    row = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_len + row)
    first, piece = cut(context, splits, WINDOW, MIN_PIECE, BN)
    begin = first + split * piece
    end = tl.minimum(begin + piece, context)
    if begin >= end:
        return
    g = tl.arange(0, BG)
    d = tl.arange(0, BD)
    head = kv * GROUP + g
    mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + row.to(tl.int64) * q_stride + head[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    maximum = tl.full((BG,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BG,), dtype=tl.float32)
    acc = tl.zeros((BG, BD), dtype=tl.float32)
    for at in range(begin, end, BN):
        p = at + tl.arange(0, BN)
        slot = load_places(block_table, row, table_stride, p, end, BLOCK_TOKENS)
        k = load_heads(keys, slot, kv, p < end, KV_HEADS, DIM, BD)
        scores = dot(query, tl.trans(k), tl.zeros((BG, BN), dtype=tl.float32)) * scaling
        scores = tl.where((p < end)[None, :], scores, float("-inf"))
        v = load_heads(values, slot, kv, p < end, KV_HEADS, DIM, BD)
        maximum, total, acc = add_tile(scores, v, maximum, total, acc)
    heads: tl.constexpr = KV_HEADS * GROUP
    if splits == 1:
        to = out + (row.to(tl.int64) * heads + head[:, None]) * DIM + d[None, :]
        tl.store(to, narrow(acc / total[:, None], out.dtype.element_ty), mask=mask)
    else:
        part = scratch + ((split * tl.num_programs(0) + row).to(tl.int64) * heads + head) * (DIM + 2)
        tl.store(part[:, None] + d[None, :], acc, mask=mask)
        tl.store(part + DIM, maximum, mask=g < GROUP)
        tl.store(part + DIM + 1, total, mask=g < GROUP)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=TABLES)
def combine_splits(
    scratch, context_len, out, splits,
    WINDOW: tl.constexpr, DIM: tl.constexpr, MIN_PIECE: tl.constexpr, MAX_SPLITS: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Combines the partial results of decode_attention, of at most MAX_SPLITS splits, for one head of one row."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    context = tl.load(context_len + row)
    if context == 0:
        return
    first, piece = cut(context, splits, WINDOW, MIN_PIECE, BN)
    split = tl.arange(0, MAX_SPLITS)
    d = tl.arange(0, BD)
    there = (first + split * piece < context) & (split < splits)
    rows, heads = tl.num_programs(0), tl.num_programs(1)
    part = scratch + ((split * rows + row).to(tl.int64) * heads + head) * (DIM + 2)
    maximum = tl.load(part + DIM, mask=there, other=float("-inf"))
    factor = tl.where(there, tl.exp2(maximum - tl.max(maximum, 0)), 0.0)
    total = tl.sum(factor * tl.load(part + DIM + 1, mask=there, other=0.0), 0)
    acc = tl.load(part[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    combined = tl.sum(acc * factor[:, None], 0) / total
    tl.store(out + (row.to(tl.int64) * heads + head) * DIM + d, narrow(combined, out.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["rows", "table_stride"], do_not_specialize_on_alignment=TABLES)
def prefill_attention(
    q, q_stride, keys, values, query_start, context_len, block_table, rows, table_stride, out, scaling,
    WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Computes attention for one head and one tile of a row's tokens."""
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
    # tokens after the row's end attend to the same positions as its last token, so that no softmax is over an empty set
    position = tl.minimum(context - end + t, context - 1)
    last = tl.minimum(context - end + t0 + BT, context)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - end + t0 - WINDOW + 1, 0)
    maximum = tl.full((BT,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BT,), dtype=tl.float32)
    acc = tl.zeros((BT, BD), dtype=tl.float32)
    for at in range(first, last, BN):
        p = at + tl.arange(0, BN)
        slot = load_places(block_table, row, table_stride, p, last, BLOCK_TOKENS)
        k = load_heads(keys, slot, head // GROUP, p < last, KV_HEADS, DIM, BD)
        scores = dot(query, tl.trans(k), tl.zeros((BT, BN), dtype=tl.float32)) * scaling
        visible = (p[None, :] <= position[:, None]) & (p < last)[None, :]
        if WINDOW > 0:
            visible &= p[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
        v = load_heads(values, slot, head // GROUP, p < last, KV_HEADS, DIM, BD)
        maximum, total, acc = add_tile(scores, v, maximum, total, acc)
    to = out + t.to(tl.int64)[:, None] * (KV_HEADS * GROUP * DIM) + head * DIM + d[None, :]
    tl.store(to, narrow(acc / total[:, None], out.dtype.element_ty), mask=mask)
