"""Attention over a paged KV cache, as an attention function of transformers.

Decode rows are computed together, in buckets of similar context length, so that padding stays below a factor of two.
Prompt chunks are computed row by row. Grouped-query heads are never copied: decode folds a group's heads into the query
dimension, and a chunk broadcasts keys over the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.decoder import AttentionPass
from node_agent.types import StepBatch


@dataclass(frozen=True)
class DecodeBucket:
    """Decode rows whose contexts differ by less than a factor of two."""

    rows: torch.Tensor
    """i64[B]: indices of the tokens in the pass"""
    slots: torch.Tensor
    """i64[B * context]: cache slots of all context positions, padded with slot 0"""
    lengths: torch.Tensor
    """i64[B]: context length of each row"""
    context: int
    """number of positions of the longest context"""
    ragged: bool


@dataclass(frozen=True)
class Chunk:
    """Prompt chunk of one sequence: tokens [start, end) of the pass, which are the last of its `context` positions."""

    start: int
    end: int
    context: int
    slots: torch.Tensor
    """i64[context]: cache slot of each position"""


@dataclass
class AttentionPlan:
    """Arguments of attention that all layers of a pass share; built once per pass."""

    keys: list[torch.Tensor]
    """keys of each layer's cache, [slots, kv heads, head dim]"""
    values: list[torch.Tensor]
    slot_mapping: torch.Tensor
    buckets: list[DecodeBucket]
    chunks: list[Chunk]
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)
    """masks by two numbers: the index of the bucket, or -1 - the index of the chunk, and the sliding window (None:
    without one)"""
    compiled: AttentionPass | None = None
    """arguments of the compiled operators, if these compute the decode rows; there are then no buckets"""
    wide: bool = False
    """True if prompt chunks attend in fp32, which may be faster than the cache's dtype"""


def plan_attention(
    batch: StepBatch,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    block_tokens: int,
    compiled: AttentionPass | None = None,
    wide: bool = False,
) -> AttentionPlan:
    """Returns the AttentionPlan of a pass. With `compiled`, decode rows get no buckets."""
    device = batch.token_ids.device
    offsets = torch.arange(block_tokens, device=device)

    def slots_of(row: int, context: int) -> torch.Tensor:
        blocks = batch.block_table[row, : -(-context // block_tokens)].long()
        return (blocks[:, None] * block_tokens + offsets).flatten()[:context]

    buckets: dict[int, list[int]] = {}
    for row in range(0 if compiled else batch.n_decode):
        buckets.setdefault(batch.context_lens[row].bit_length(), []).append(row)
    decode: list[DecodeBucket] = []
    for rows in buckets.values():
        lengths = [batch.context_lens[row] for row in rows]
        longest = max(lengths)
        slots = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            slots[i, :length] = slots_of(row, length)
        decode.append(
            DecodeBucket(
                rows=torch.tensor(rows, device=device),
                slots=slots.flatten(),
                lengths=torch.tensor(lengths, device=device),
                context=longest,
                ragged=min(lengths) < longest,
            )
        )
    chunks: list[Chunk] = []
    start = batch.n_decode
    for row in range(batch.n_decode, batch.n_rows):
        length, context = batch.query_lens[row], batch.context_lens[row]
        chunks.append(Chunk(start, start + length, context, slots_of(row, context)))
        start += length
    written = batch.slot_mapping[: batch.n_tokens]
    return AttentionPlan(keys, values, written, decode, chunks, compiled=compiled, wide=wide)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # noqa: ARG001 - part of the signature; masks come from the plan
    scaling: float,
    garnish_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Writes the pass's keys and values to the cache; each row then attends over its context in the cache.

    The signature is that of attention functions in transformers. query is [1, H, T, D], key and value are [1, KV, T,
    D]. Returns the output [1, T, H, D], and None for the attention weights.
    """
    if garnish_plan is None:
        raise RuntimeError("paged_attention was called outside a Garnish pass")
    plan = garnish_plan
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = plan.keys[layer], plan.values[layer]
    keys.index_copy_(0, plan.slot_mapping, key[0].transpose(0, 1))
    values.index_copy_(0, plan.slot_mapping, value[0].transpose(0, 1))
    heads, head_dim, kv_heads = query.shape[1], query.shape[3], key.shape[1]
    out = query.new_empty(query.shape[2], heads, head_dim)
    for i, bucket in enumerate(plan.buckets):
        b = bucket.lengths.shape[0]
        k = keys.index_select(0, bucket.slots).view(b, bucket.context, kv_heads, head_dim).transpose(1, 2)
        v = values.index_select(0, bucket.slots).view(b, bucket.context, kv_heads, head_dim).transpose(1, 2)
        q = query[0].index_select(1, bucket.rows).transpose(0, 1).reshape(b, kv_heads, heads // kv_heads, head_dim)
        mask = _cached(plan, (i, sliding_window), partial(_decode_mask, bucket, sliding_window))
        done = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        out.index_copy_(0, bucket.rows, done.reshape(b, heads, head_dim))
    attend_chunks(plan, query, keys, values, out, scaling, sliding_window)
    return out.unsqueeze(0), None


def attend_chunks(
    plan: AttentionPlan,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scaling: float,
    window: int | None,
) -> None:
    """Writes the attention of the plan's prompt chunks to out [T, H, D]. query is [1, H, T, D]; keys and values are
    those of one layer's cache."""
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    group = query.shape[1] // kv_heads
    dtype = torch.float32 if plan.wide else keys.dtype
    for i, chunk in enumerate(plan.chunks):
        length = chunk.end - chunk.start
        is_full_prompt = length == chunk.context and (window is None or chunk.context <= window)
        mask = None if is_full_prompt else _cached(plan, (-1 - i, window), partial(_chunk_mask, chunk, window))
        k, v = (
            cached.index_select(0, chunk.slots).to(dtype).permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1)
            for cached in (keys, values)
        )
        q = query[0, :, chunk.start : chunk.end].to(dtype).reshape(kv_heads, group, length, head_dim)
        done = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_full_prompt, scale=scaling)
        out[chunk.start : chunk.end] = done.reshape(kv_heads * group, length, head_dim).transpose(0, 1)


def _cached(
    plan: AttentionPlan, key: tuple[int, int | None], make: Callable[[], torch.Tensor | None]
) -> torch.Tensor | None:
    if key not in plan.masks:
        plan.masks[key] = make()
    return plan.masks[key]


def _decode_mask(bucket: DecodeBucket, window: int | None) -> torch.Tensor | None:
    """Returns bool [B, 1, 1, context], True at positions visible to the row's token; None if all are."""
    if not bucket.ragged and (window is None or bucket.context <= window):
        return None
    at = torch.arange(bucket.context, device=bucket.lengths.device)
    ends = bucket.lengths[:, None]
    mask = at < ends
    if window is not None:
        mask &= at >= ends - window
    return mask[:, None, None, :]


def _chunk_mask(chunk: Chunk, window: int | None) -> torch.Tensor:
    """Returns the causal mask of a prompt chunk, bool [length, context], limited to the sliding window if there is
    one."""
    device = chunk.slots.device
    at = torch.arange(chunk.context, device=device)
    queries = torch.arange(chunk.context - (chunk.end - chunk.start), chunk.context, device=device)[:, None]
    mask = at <= queries
    if window is not None:
        mask &= at > queries - window
    return mask
