"""What a decoder layer computes between its products on a GPU: the contract.

These are the operations that `decoder` compiles for a CPU. Every output goes to a tensor that the caller gives, and
every value that changes from step to step is a tensor: grids depend on shapes alone, so a CUDA graph that was captured
for a bucket of rows serves every batch of that bucket. Tensors are not checked for their contents, which the host does
not know. All raise KernelArgumentError before anything is launched.

The cache is the one of `decoder`: keys and values [slots, kv_heads, head_dim] of one layer. Position p of row r lies in
slot block_table[r, p // block_tokens] * block_tokens + p % block_tokens. What lies behind a row's context is never
read, so it may be NaN; what lies behind a row in block_table is not looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.decoder import Heads, PagedCache

LEAST_PIECE = 128
"""Context positions; a split of decode attention has no fewer, or what it leaves behind costs more than it brings."""
MOST_SPLITS = 32
"""Parts of a context; a power of two, as one program adds all up."""
ENOUGH_PROGRAMS = 512
"""Programs that keep the largest GPU busy: some four on each of its processors."""


@dataclass(frozen=True)
class Rotary:
    """A table of rotary embeddings: cos and sin [positions, head_dim // 2] in the model's dtype, as both halves of a
    head have them. Scaled frequencies (Llama 3.1's, YaRN's) are what the table is made of."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """The sequences that attend.

    context_len i32[R], this pass's tokens included; 0: a padding row, for which nothing is read or written
    block_table i32[R, blocks], rows of stride 1
    query_start i32[R + 1]: first token of each row, and the end of the last; None: row r is token r alone. A row's
                tokens are the last of its context. They need not begin at token 0, and a row may have none.
    """

    context_len: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor | None = None


class LayerOperations(Protocol):
    """T tokens, R rows; dtype fp32, fp16 or bf16, the same for all tensors whose dtype is not named."""

    def add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Normalises each token: residual += x, then out = weight * (residual / sqrt(mean(residual^2) + eps)); without
        a residual the norm is of x.

        x        [T, width], rows of stride 1
        weight   [width]
        out      [T, width], contiguous
        residual [T, width], contiguous, in place; None: nothing is added, x stays as it is

        Rounded as Hugging Face rounds: the sum to the dtype, the mean in fp32, the quotient to the dtype before it is
        multiplied. One launch.
        """

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, cache: PagedCache, *, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotates q in place, writes rotated k and v into the cache. Heads of q and k are normed before, if the
        cache's heads have norms (Qwen3).

        qkv       [T, (heads + 2 * kv_heads) * head_dim], rows of stride 1; the columns of k and v stay as they are
        positions i64[T]
        slots     i64[T], below 0: not written into the cache. Slot 0 is padding's (`kv_blocks`): no other token has it

        Each product of the rotation is rounded, as in Hugging Face. One launch.
        """

    def silu_mul(self, gate_up: torch.Tensor, *, out: torch.Tensor) -> None:
        """Writes out = silu(gate) * up, the first factor rounded to the dtype. gate_up [T, 2 * width], gate first, rows
        of stride 1; out [T, width], contiguous. One launch."""

    def decode_attention(
        self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Computes attention of one token per row over its context, which is read where it lies.

        q       [R, >= heads * head_dim], rows of stride 1; q is the first columns, so `qkv` will do
        rows    without query_start
        out     [R, heads * head_dim], contiguous; padding rows are not written
        scratch `decode_scratch` of as many rows; its first size is the number of splits of a context

        Weights are rounded to the cache's dtype before they are multiplied by values. With one split one launch, else
        two; the same batch and scratch sizes give the same bits, whatever the neighbours.
        """

    def prefill_attention(self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor) -> None:
        """Computes causal attention of each row's chunk of tokens over the row's context up to each token.

        q       [T, >= heads * head_dim], as in `decode_attention`; the chunk's keys and values are in the cache already
        rows    with query_start; T may exceed what the rows have
        out     [T, heads * head_dim], contiguous; tokens of no row are not written

        Weights are rounded as in `decode_attention`. One launch.
        """


def decode_splits(rows: int, kv_heads: int, max_context: int) -> int:
    """Returns into how many parts contexts are split at most, so that a bucket of `rows` fills a GPU."""
    return max(1, min(MOST_SPLITS, -(-ENOUGH_PROGRAMS // (rows * kv_heads)), -(-max_context // LEAST_PIECE)))


def decode_scratch(rows: int, heads: Heads, max_context: int, device: torch.device) -> torch.Tensor:
    """Returns f32[splits, rows, heads, head_dim + 2] for `decode_attention`. Layers can share it."""
    splits = decode_splits(rows, heads.kv_heads, max_context)
    return torch.empty(splits, rows, heads.heads, heads.head_dim + 2, device=device)
