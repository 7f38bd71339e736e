"""The meaning of every LoRA operation in plain torch. Slow, short, and what the tests hold the others against."""

from __future__ import annotations

import torch

ROW_ALIGN = 64
"""Bytes; the unit of `row_offset`."""


def lora_rows(pool: torch.Tensor, offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Gather rows from a flat pool: offsets i32[n] in ROW_ALIGN units -> [n, width]."""
    per_unit = ROW_ALIGN // pool.element_size()
    index = offsets.long()[:, None] * per_unit + torch.arange(width, device=pool.device)
    return pool[index]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    token_slot: torch.Tensor,
    pool: torch.Tensor,
    rank: torch.Tensor,
    scale: torch.Tensor,
    first: torch.Tensor,
    row_offset: torch.Tensor,
) -> None:
    """y[t] += scale[s] * (x[t] @ A_s^T) @ B_s^T with s = token_slot[t]; rows with s < 0 or rank 0 stay as they are.

    y          [T, d_out], in place
    x          [T, d_in]
    token_slot i32[T]
    pool       flat, the weights' dtype
    rank       i32[slots], scale f32[slots], first i32[slots, 2]: one layer's and projection's view of the AdapterTable
    row_offset i32[rows]
    """
    for slot in torch.unique(token_slot).tolist():
        if slot < 0 or not int(rank[slot]):
            continue
        r = int(rank[slot])
        a_first, b_first = first[slot].tolist()
        a = lora_rows(pool, row_offset[a_first : a_first + r], x.shape[1])
        b = lora_rows(pool, row_offset[b_first : b_first + r], y.shape[1])
        rows = token_slot == slot
        added = scale[slot].double() * (x[rows].double() @ a.double().T) @ b.double()
        y[rows] = (y[rows].double() + added).to(y.dtype)
