"""Reference of the LoRA operations in plain torch, in float64. Tests compare the other implementations with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.view import ROW_ALIGN, GroupView


def lora_rows(pool: torch.Tensor, offsets: torch.Tensor, width: int) -> torch.Tensor:
    """Returns the rows [n, width] at `offsets` in a flat pool; offsets i32[n] are in units of ROW_ALIGN bytes."""
    per_unit = ROW_ALIGN // pool.element_size()
    index = offsets.long()[:, None] * per_unit + torch.arange(width, device=pool.device)
    return pool[index]


def add_group(ys: Sequence[torch.Tensor], x: torch.Tensor, token_slot: torch.Tensor, view: GroupView) -> None:
    """Adds LoRA to each output p: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for each token t.

    s is token_slot[t]; A_sp and B_sp are the matrices of the adapter in slot s for projection p. Rows with s < 0 or
    rank 0 are not changed.

    ys         P tensors [T, d_out of p], in place
    x          [T, d_in]
    token_slot i32[T]
    """
    for p, y in enumerate(ys):
        for slot in torch.unique(token_slot).tolist():
            if slot < 0 or not int(view.rank[slot, p]):
                continue
            r = int(view.rank[slot, p])
            a_first, b_first = view.first[slot, p].tolist()
            a = lora_rows(view.pool, view.row_offset[a_first : a_first + r], x.shape[1])
            b = lora_rows(view.pool, view.row_offset[b_first : b_first + r], y.shape[1])
            rows = token_slot == slot
            added = view.scale[slot, p].double() * (x[rows].double() @ a.double().T) @ b.double()
            y[rows] = (y[rows].double() + added).to(y.dtype)
