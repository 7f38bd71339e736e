"""Interface of the operations between a decoder layer's matrix products on a GPU.

`decoder` has the same operations for a CPU. The caller allocates each output. All values that change from step to step
are in tensors, and grids depend on shapes alone. A CUDA graph is captured for a bucket, a padded number of rows. It
therefore serves any batch with at most that many rows. The contents of tensors are not checked, since the host does not
know them. All operations raise KernelArgumentError before the first launch.

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
"""Minimum number of context positions in a split of decode attention.

Combining smaller splits costs more time than their parallel computation saves.
"""
MAX_SPLITS = 32
"""Maximum number of splits of a context; a power of two, since one program combines all splits."""
ENOUGH_PROGRAMS = 512
"""Number of programs that keep the largest GPU busy: about four per multiprocessor."""


@dataclass(frozen=True)
class Rotary:
    """Table of rotary embeddings: cos and sin [positions, head_dim // 2] in the model's dtype.

    Both halves of a head use the same values. Scaled frequencies (Llama 3.1, YaRN) are in the table already.
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """The R sequences of a call of attention.

    context_len i32[R], tokens including those of this pass; 0 is a padding row, for which nothing is read or written
    block_table i32[R, blocks], rows of stride 1
    query_start i32[R + 1]: first token of each row, and the end of the last; with None row r has token r alone. A
                row's tokens are the last ones of its context. The first row need not begin at token 0, and a row may
                have no tokens.
    """

    context_len: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor | None = None


class LayerOperations(Protocol):
    """The operations of a decoder layer, for T tokens in R rows.

    All tensors without a stated dtype have the same one: fp32, fp16 or bf16.
    """

    def add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Computes residual += x, then out = weight * (residual / sqrt(mean(residual^2) + eps)) for each token.

        x        [T, width], rows of stride 1
        weight   [width]
        out      [T, width], contiguous
        residual [T, width], contiguous, in place; with None x is normalised and not changed

        Rounding is that of Hugging Face: the sum is rounded to the dtype, the mean is fp32, and the quotient is rounded
        to the dtype before it is multiplied. Makes one launch.
        """

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, cache: PagedCache, *, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotates q in place, and writes the rotated k and the v to the cache.

        Heads of q and k are normalised first if the cache's heads have norms (Qwen3).

        qkv       [T, (heads + 2 * kv_heads) * head_dim], rows of stride 1; the columns of k and v are not changed
        positions i64[T]
        slots     i64[T]; a token with a slot below 0 is not written. Slot 0 is for padding (`kv_blocks`) only

        Each product of the rotation is rounded to the dtype, as in Hugging Face. Makes one launch.
        """

    def silu_mul(self, gate_up: torch.Tensor, *, out: torch.Tensor) -> None:
        """Writes out = silu(gate) * up; silu's result is rounded to the dtype.

        gate_up [T, 2 * width], gate first, rows of stride 1
        out     [T, width], contiguous

        Makes one launch.
        """

    def decode_attention(
        self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Computes attention of one token per row over its context.

        q       [R, >= heads * head_dim], rows of stride 1; only the first columns are read, so `qkv` can be passed
        rows    query_start must be None
        out     [R, heads * head_dim], contiguous; padding rows are not written
        scratch from `decode_scratch` for R rows; its first dimension is the number of splits of a context

        Softmax weights are rounded to the cache's dtype before they are multiplied by values. Makes one launch for one
        split, else two. A row's bits depend on the sizes of batch and scratch, but not on the other rows.
        """

    def prefill_attention(self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor) -> None:
        """Computes causal attention of each row's chunk of tokens over the row's context.

        q       [T, >= heads * head_dim], as in `decode_attention`; the chunk's keys and values are in the cache already
        rows    query_start is required; T may exceed the number of tokens in the rows
        out     [T, heads * head_dim], contiguous; tokens that belong to no row are not written

        Softmax weights are rounded as in `decode_attention`. Makes one launch.
        """


def decode_splits(rows: int, kv_heads: int, max_context: int) -> int:
    """Returns the number of splits of a context with which a bucket of `rows` rows keeps a GPU busy."""
    return max(1, min(MAX_SPLITS, -(-ENOUGH_PROGRAMS // (rows * kv_heads)), -(-max_context // MIN_PIECE)))


def decode_scratch(rows: int, heads: Heads, max_context: int, device: torch.device) -> torch.Tensor:
    """Allocates f32[splits, rows, heads, head_dim + 2] for `decode_attention`. Layers can share it."""
    splits = decode_splits(rows, heads.kv_heads, max_context)
    return torch.empty(splits, rows, heads.heads, heads.head_dim + 2, device=device)
