"""Drawn inputs for LoRA operations: the one generator of tests and benchmarks.

Everything that no operation may read is NaN: the pool between rows, x of base tokens, the scratch. So is y where
nothing may be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.reference import add_group
from kernels.view import GroupView, LoraCall, group_view

POPULARITY = ("distinct", "uniform", "zipf", "identical", "skewed")


@dataclass(frozen=True)
class Case:
    """One call's arguments, as in the operations' docstrings."""

    ys: list[torch.Tensor]
    x: torch.Tensor
    seg_start: torch.Tensor
    seg_slot: torch.Tensor
    token_slot: torch.Tensor
    view: GroupView
    xa: torch.Tensor
    ranks: list[int]
    """per slot"""

    @property
    def max_rank(self) -> int:
        return max(self.ranks)

    def call(self, ys: list[torch.Tensor] | None = None, **others: Any) -> LoraCall:
        """Returns the call on these outputs (None: fresh ones), with other values of what `others` names."""
        outputs = self.fresh() if ys is None else ys
        call = LoraCall(outputs, self.x, self.seg_start, self.seg_slot, self.view, self.xa, self.max_rank)
        return replace(call, **others)

    def expected(self) -> list[torch.Tensor]:
        """float64 results by the reference."""
        ys = [y.double() for y in self.ys]
        add_group(ys, self.x, self.token_slot, self.view)
        return ys

    def fresh(self) -> list[torch.Tensor]:
        """Copies of ys, each with the strides that a fused product's parts have."""
        joined = torch.cat(self.ys, dim=1)
        return list(torch.split(joined, [y.shape[1] for y in self.ys], dim=1))

    def weight_bytes(self) -> int:
        """Bytes of the distinct adapters' rows in this group: what a call has to read at least."""
        slots = {slot for slot in self.seg_slot.tolist() if slot >= 0}
        per_rank = sum(self.x.shape[1] + y.shape[1] for y in self.ys)
        size: int = sum(self.ranks[slot] for slot in slots) * per_rank * self.x.dtype.itemsize
        return size


def draw_slots(popularity: str, requests: int, adapters: int, generator: torch.Generator) -> list[int]:
    """Which adapter each request uses, neighbours equal where possible."""
    if popularity == "distinct":
        return [i % adapters for i in range(requests)]
    if popularity == "identical":
        return [0] * requests
    weights = {
        "uniform": torch.ones(adapters),
        "zipf": 1 / torch.arange(1, adapters + 1),
        "skewed": torch.tensor([9.0] + [1 / adapters] * (adapters - 1)),
    }[popularity]
    return sorted(torch.multinomial(weights, requests, replacement=True, generator=generator).tolist())


def draw_case(
    ranks: Sequence[int],
    segments: Sequence[tuple[int, int]],
    d_in: int,
    d_outs: Sequence[int],
    dtype: torch.dtype,
    seed: int = 0,
    scattered: bool = True,
    device: str = "cpu",
    splits: int = 8,
) -> Case:
    """`ranks` per slot (0: adapts nothing), `segments` (slot or -1, tokens). Rows lie at random 64-byte offsets when
    scattered, else one after the other."""
    generator = torch.Generator().manual_seed(seed)
    projections, slots, per_unit = len(d_outs), len(ranks), 64 // dtype.itemsize
    layers, layer = 2, 1
    units = [-(-width // per_unit) for width in (d_in, *d_outs)]
    need = sum(rank * (projections * units[0] + sum(units[1:])) for rank in ranks)
    rows = [(s, p, side) for s in range(slots) for p in range(projections) for side in (0, 1) for _ in range(ranks[s])]
    order = torch.randperm(len(rows), generator=generator).tolist() if scattered else range(len(rows))
    pool = torch.full(((need + len(rows) + 1) * per_unit,), torch.nan, dtype=dtype)
    row_offset = torch.zeros(max(1, len(rows)), dtype=torch.int32)
    at = 1
    for index in order:
        _, p, side = rows[index]
        width = d_outs[p] if side else d_in
        row = torch.randn(width, generator=generator) / (ranks[rows[index][0]] if side else d_in) ** 0.5
        pool[at * per_unit : at * per_unit + width] = row.to(dtype)
        row_offset[index] = at
        at += units[1 + p if side else 0] + int(scattered)
    rank = torch.zeros(slots, layers, 7, dtype=torch.int32)
    scale = torch.full((slots, layers, 7), torch.nan)
    first = torch.zeros(slots, layers, 7, 2, dtype=torch.int32)
    for index, (s, p, side) in reversed(list(enumerate(rows))):
        rank[s, layer, p], scale[s, layer, p] = ranks[s], 0.5 + 0.25 * s + p
        first[s, layer, p, side] = index
    table = (pool.to(device), rank.to(device), scale.to(device), first.to(device), row_offset.to(device))
    lengths = [length for _, length in segments]
    slot_of = torch.tensor([slot for slot, _ in segments], dtype=torch.int32)
    token_slot = slot_of.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    tokens = sum(lengths)
    x = torch.randn(tokens, d_in, generator=generator)
    x[token_slot < 0] = torch.nan
    ys = [torch.randn(tokens, width, generator=generator).to(dtype) for width in d_outs]
    adapted = torch.tensor([slot >= 0 and ranks[slot] > 0 for slot, _ in segments], dtype=torch.bool)
    for y in ys:
        y[~adapted.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))] = torch.nan
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Case(
        ys=[y.to(device) for y in ys],
        x=x.to(dtype).to(device),
        seg_start=starts.to(device),
        seg_slot=slot_of.to(device),
        token_slot=token_slot.to(device),
        view=group_view(*table, layer, range(projections)),
        xa=torch.full((splits, projections, tokens, max(16, *ranks)), torch.nan, device=device),
        ranks=list(ranks),
    )


def relative_error(found: Sequence[torch.Tensor], case: Case) -> float:
    """Largest difference over the largest value, over the rows that an adapter writes; inf when another row changed."""
    worst = 0.0
    for y, want, before in zip(found, case.expected(), case.ys, strict=True):
        untouched = before.isnan().all(dim=1)
        if not bool(y[untouched].isnan().all()):
            return torch.inf
        if bool((~untouched).any()):
            difference = (y[~untouched].double() - want[~untouched]).abs()
            worst = max(worst, float((difference / want[~untouched].abs().max()).nan_to_num(torch.inf).max()))
    return worst
