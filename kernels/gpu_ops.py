"""Interface of the operations between a decoder layer's matrix products on a GPU.

`decoder` has the same operations for a CPU. Each output is written to a tensor of the caller's, and all values that
change from step to step are tensors. Grids depend on shapes alone, so a CUDA graph captured for a bucket of rows serves
any batch of that bucket. Contents of tensors are not checked: the host does not know them. All operations raise
KernelArgumentError before the first launch.

The cache is that of `decoder`: keys and values [slots, kv_heads, head_dim] of one layer. Position p of row r is in slot
block_table[r, p // block_tokens] * block_tokens + p % block_tokens. Slots after a row's context are never read, so they
may be NaN; entries of block_table after a row's blocks are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.decoder import Heads, PagedCache

MIN_PIECE = 128
"""Context positions of a split of decode attention; combining smaller ones costs more than they gain."""
MAX_SPLITS = 32
"""Splits of a context; a power of two, as one program combines all."""
ENOUGH_PROGRAMS = 512
"""Programs that keep the largest GPU busy: about four per multiprocessor."""


@dataclass(frozen=True)
class Rotary:
    """Table of rotary embeddings: cos and sin [positions, head_dim // 2] in the model's dtype.

    Both halves of a head use the same values. Scaled frequencies (Llama 3.1, YaRN) are in the table already.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """The sequences that attend, R rows.

    context_len i32[R], tokens, this pass's included; 0: a padding row, for which nothing is read or written
    block_table i32[R, blocks], rows of stride 1
    query_start i32[R + 1]: first token of each row, and the end of the last; None: row r is token r alone. A row's
                tokens are the last of its context. They need not begin at token 0, and a row may have none.
    """

    context_len: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor | None = None


class LayerOperations(Protocol):
    """The operations, for T tokens in R rows. All tensors without a named dtype share one: fp32, fp16 or bf16."""

    def add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Computes residual += x, then out = weight * (residual / sqrt(mean(residual^2) + eps)) for each token.

        x        [T, width], rows of stride 1
        weight   [width]
        out      [T, width], contiguous
        residual [T, width], contiguous, in place; None: the norm is of x, which is not changed

        Rounded as Hugging Face rounds: the sum to the dtype, the mean in fp32, the quotient to the dtype before it is
        multiplied. One launch.
        """

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, cache: PagedCache, *, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotates q in place, and writes rotated k, and v, to the cache.

        Heads of q and k are normed first if the cache's heads have norms (Qwen3).

        qkv       [T, (heads + 2 * kv_heads) * head_dim], rows of stride 1; the columns of k and v are not changed
        positions i64[T]
        slots     i64[T]; a token with a slot below 0 is not written. Slot 0 is for padding (`kv_blocks`) only

        Each product of the rotation is rounded, as in Hugging Face. One launch.
        """

    def silu_mul(self, gate_up: torch.Tensor, *, out: torch.Tensor) -> None:
        """Writes out = silu(gate) * up; silu's result is rounded to the dtype.

        gate_up [T, 2 * width], gate first, rows of stride 1
        out     [T, width], contiguous

        One launch.
        """

    def decode_attention(
        self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Computes attention of one token per row over its context.

        q       [R, >= heads * head_dim], rows of stride 1; its first columns are used, so `qkv` fits
        rows    without query_start
        out     [R, heads * head_dim], contiguous; padding rows are not written
        scratch `decode_scratch` for R rows; its first size is the number of splits of a context

        Weights are rounded to the cache's dtype before they are multiplied by values. One launch for one split, else
        two. A row's bits depend on the sizes of batch and scratch, not on the other rows.
        """

    def prefill_attention(self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor) -> None:
        """Computes causal attention of each row's chunk of tokens over the row's context.

        q       [T, >= heads * head_dim], as in `decode_attention`; the chunk's keys and values are in the cache already
        rows    with query_start; T may exceed the rows' tokens
        out     [T, heads * head_dim], contiguous; tokens of no row are not written

        Weights are rounded as in `decode_attention`. One launch.
        """


def decode_splits(rows: int, kv_heads: int, max_context: int) -> int:
    """Returns the number of splits of a context with which a bucket of `rows` fills a GPU."""
    return max(1, min(MAX_SPLITS, -(-ENOUGH_PROGRAMS // (rows * kv_heads)), -(-max_context // MIN_PIECE)))


def decode_scratch(rows: int, heads: Heads, max_context: int, device: torch.device) -> torch.Tensor:
    """Allocates f32[splits, rows, heads, head_dim + 2] for `decode_attention`. Layers can share it."""
    splits = decode_splits(rows, heads.kv_heads, max_context)
    return torch.empty(splits, rows, heads.heads, heads.head_dim + 2, device=device)
