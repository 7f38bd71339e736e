"""The operations of `gpu_ops` in Triton: their tile sizes, grids and launches.

Tile sizes are chosen by hand, not tuned.
"""

from __future__ import annotations

import math

import torch
import triton

from kernels import gpu_attention, gpu_layer
from kernels.decoder import PagedCache
from kernels.gpu_calls import check_decode, check_norm, check_prefill, check_rotation, check_silu
from kernels.gpu_ops import MAX_SPLITS, MIN_PIECE, Rotary, Rows

LOG2_E = math.log2(math.e)
SILU_BLOCK = 1024
HEADS_PER_PROGRAM = 4
MIN_DOT = 16
TILE_BYTES = 16 << 10
"""Maximum bytes of keys that attention loads for one tile of positions; the same limit applies to values.

Two such tiles fit into the shared memory of any GPU since sm_80.
"""
LARGEST_TILE = 64


class TritonOperations:
    """LayerOperations in Triton. They also run in Triton's interpreter."""

    def add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        check_norm(x, weight, out, residual)
        width = weight.shape[0]
        block = triton.next_power_of_2(width)
        if x.shape[0]:
            gpu_layer.add_rms_norm[(x.shape[0],)](
                x, x.stride(0), out if residual is None else residual, weight, out, eps,
                ADDS=residual is not None, WIDTH=width, BLOCK=block, num_warps=max(1, min(16, block // 512)),
            )  # fmt: skip

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, cache: PagedCache, *, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        check_rotation(qkv, rotary, cache, positions, slots)
        heads = cache.heads
        half, per = heads.head_dim // 2, HEADS_PER_PROGRAM
        q_norm, k_norm = heads.norms or (qkv, qkv)
        if qkv.shape[0]:
            gpu_layer.rotate_and_store[(qkv.shape[0], -(-heads.heads // per) + -(-heads.kv_heads // per))](
                qkv, qkv.stride(0), rotary.cos, rotary.sin, positions, slots, cache.keys, cache.values,
                q_norm, k_norm, heads.norm_eps, NORMED=heads.norms is not None, HEADS=heads.heads,
                KV_HEADS=heads.kv_heads, HALF=half, BH=per, BD=triton.next_power_of_2(half), num_warps=1,
            )  # fmt: skip

    def silu_mul(self, gate_up: torch.Tensor, *, out: torch.Tensor) -> None:
        check_silu(gate_up, out)
        tokens, width = out.shape
        if tokens:
            gpu_layer.silu_mul[(tokens, -(-width // SILU_BLOCK))](
                gate_up, gate_up.stride(0), out, WIDTH=width, BLOCK=SILU_BLOCK
            )

    def decode_attention(
        self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        check_decode(q, cache, rows, out, scratch)
        heads = cache.heads
        count, splits, group = q.shape[0], scratch.shape[0], heads.heads // heads.kv_heads
        if not count:
            return
        width, tile = attention_tile(heads.head_dim, q.dtype)
        shared = {"WINDOW": heads.window or 0, "DIM": heads.head_dim, "MIN_PIECE": MIN_PIECE, "BN": tile, "BD": width}
        gpu_attention.decode_attention[(count, heads.kv_heads, splits)](
            q, q.stride(0), cache.keys, cache.values, rows.context_len, rows.block_table, rows.block_table.stride(0),
            out, scratch, splits, heads.scaling * LOG2_E, BLOCK_TOKENS=cache.block_tokens, GROUP=group,
            KV_HEADS=heads.kv_heads, BG=max(MIN_DOT, triton.next_power_of_2(group)), num_stages=2, **shared,
        )  # fmt: skip
        if splits > 1:
            gpu_attention.combine_splits[(count, heads.heads)](
                scratch, rows.context_len, out, splits, MAX_SPLITS=MAX_SPLITS, **shared
            )

    def prefill_attention(self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor) -> None:
        check_prefill(q, cache, rows, out)
        heads, tokens, count = cache.heads, q.shape[0], rows.context_len.shape[0]
        if not tokens or not count:
            return
        width, tile = attention_tile(heads.head_dim, q.dtype)
        gpu_attention.prefill_attention[(-(-tokens // tile) + count, heads.heads)](
            q, q.stride(0), cache.keys, cache.values, rows.query_start, rows.context_len, rows.block_table, count,
            rows.block_table.stride(0), out, heads.scaling * LOG2_E, WINDOW=heads.window or 0,
            BLOCK_TOKENS=cache.block_tokens, GROUP=heads.heads // heads.kv_heads, KV_HEADS=heads.kv_heads,
            DIM=heads.head_dim, BT=tile, BN=tile, BD=width, num_warps=8, num_stages=2,
        )  # fmt: skip


def attention_tile(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns (columns of a padded head, positions of a tile), both powers of two."""
    width = max(MIN_DOT, triton.next_power_of_2(head_dim))
    return width, max(MIN_DOT, min(LARGEST_TILE, TILE_BYTES // (width * dtype.itemsize)))
