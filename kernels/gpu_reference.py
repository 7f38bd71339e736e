"""The operations of `gpu_ops` in plain torch, for a CPU. They are slow and allocate memory.

As in the kernels, control flow does not depend on the contents of tensors: contexts are computed over the full width of
the block table, with masks.
"""

from __future__ import annotations

import torch

from kernels.decoder import PagedCache
from kernels.gpu_calls import check_decode, check_norm, check_prefill, check_rotation, check_silu
from kernels.gpu_ops import Rotary, Rows


class TorchOperations:
    """LayerOperations in plain torch."""

    def add_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        check_norm(x, weight, out, residual)
        if residual is not None:
            x = residual.add_(x)
        out.copy_(_norm(x, weight, eps))

    def rotate_and_store(
        self, qkv: torch.Tensor, rotary: Rotary, cache: PagedCache, *, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        check_rotation(qkv, rotary, cache, positions, slots)
        heads = cache.heads
        h, kv, dim = heads.heads, heads.kv_heads, heads.head_dim
        q, k, v = qkv.view(qkv.shape[0], h + 2 * kv, dim).split([h, kv, kv], dim=1)  # type: ignore[no-untyped-call]
        new_q, new_k = (q, k) if heads.norms is None else (
            _norm(part, weight, heads.norm_eps) for part, weight in zip((q, k), heads.norms, strict=True)
        )  # fmt: skip
        cos, sin = (table.index_select(0, positions)[:, None].repeat(1, 1, 2) for table in (rotary.cos, rotary.sin))
        new_q, new_k = (part * cos + _half_turned(part) * sin for part in (new_q, new_k))
        q.copy_(new_q)
        # for a token that must not be written, the current values of slot 0 (padding) are written there again
        at, written = slots.clamp(min=0), (slots >= 0)[:, None, None]
        for stored, new in ((cache.keys, new_k), (cache.values, v)):
            stored.index_copy_(0, at, torch.where(written, new, stored.index_select(0, at)))

    def silu_mul(self, gate_up: torch.Tensor, *, out: torch.Tensor) -> None:
        check_silu(gate_up, out)
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out)

    def decode_attention(
        self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        check_decode(q, cache, rows, out, scratch)
        start = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        self.prefill_attention(q, cache, Rows(rows.context_len, rows.block_table, start), out=out)

    def prefill_attention(self, q: torch.Tensor, cache: PagedCache, rows: Rows, *, out: torch.Tensor) -> None:
        check_prefill(q, cache, rows, out)
        assert rows.query_start is not None
        heads = cache.heads
        tokens, kv, dim = q.shape[0], heads.kv_heads, heads.head_dim
        wide = q[:, : heads.heads * dim].view(tokens, kv, heads.heads // kv, dim).float()
        token = torch.arange(tokens, device=q.device)
        offsets = torch.arange(cache.block_tokens, device=q.device)
        for row in range(rows.context_len.shape[0]):
            begin, end = rows.query_start[row], rows.query_start[row + 1]
            context = rows.context_len[row]
            slots = (rows.block_table[row].long()[:, None] * cache.block_tokens + offsets).flatten()
            at = torch.arange(slots.shape[0], device=q.device)
            slots = torch.where(at < context, slots, 0)
            last = context - end + token
            visible = (at < context) & (at <= last[:, None])
            if heads.window:
                visible &= at > last[:, None] - heads.window
            keys, values = (part.index_select(0, slots).float() for part in (cache.keys, cache.values))
            values = values.masked_fill((at >= context)[:, None, None], 0.0)
            scores = torch.einsum("tkgd,pkd->tkgp", wide, keys) * heads.scaling
            weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(dim=-1)
            done = torch.einsum("tkgp,pkd->tkgd", weights, values).reshape(out.shape).to(out.dtype)
            is_of_row = (token >= begin) & (token < end) & (context > 0)
            out.copy_(torch.where(is_of_row[:, None], done, out))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)
