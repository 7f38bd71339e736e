"""What a CPU LoRA worker computes: scale * x A B of its tokens for every projection of a group, on one core."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from adapters.base_model import PROJECTIONS
from kernels.build import unless_uncompiled
from kernels.compiled import CompiledGroup, Segments, load_operators
from kernels.level import multiplies_bf16
from kernels.view import ROW_ALIGN, group_view
from node_agent.adapter_memory.host_map import HostView
from node_agent.adapter_memory.layout import contiguous_runs, row_units
from node_agent.coldstart.shared import ECHO, GROUP_NAMES, Layout
from node_agent.types import GROUPS

log = logging.getLogger(__name__)

LONG_WORK = {torch.float32: 3 << 19, torch.bfloat16: 3 << 20, torch.float16: 3 << 20}
"""Tokens times elements of A and B from which on torch's matrix products are used; set by hand, no report holds it."""
LONG_SLICE = 64
"""Tokens from which on they always are used."""
MAX_RANK = 512
"""As adapters/validate.py: no projection has more."""


class Product:
    """`add` for every layer and group. Only rows that the table names are read."""

    def __init__(self, host: HostView, layout: Layout, compiled: bool = True) -> None:
        """Without `compiled`, or where there is no compiler, torch computes short slices too."""
        self._host, self._layout = host, layout
        self._elements, self._unit = host.pool, ROW_ALIGN // host.pool.element_size()
        # numpy's views of the table: reading single entries through torch takes longer than small products
        table = host.table
        self._rank, self._scale = table.rank.numpy(), table.scale.numpy()
        self._first, self._row_offset = table.first.numpy(), table.row_offset.numpy()
        warning = "a CPU worker runs without the compiled operator, more slowly"
        self._operators = unless_uncompiled(load_operators, log, warning) if compiled else None
        bf16 = host.pool.dtype is torch.bfloat16 and multiplies_bf16()
        self.multiplied = torch.bfloat16 if bf16 else torch.float32
        """in what torch's products are computed. Slices of a node have few lengths, so that oneDNN has those in bf16
        prepared; without instructions for it they take many times as long as in fp32 (docs/design/cold-start.md). fp16
        is multiplied in fp32 everywhere: hardly a processor multiplies it, and x A^T could overflow."""
        self._groups: dict[tuple[int, int], CompiledGroup] = {}
        self._widest = max(d_in for d_in, _ in layout.widths)
        self._slot = torch.zeros(1, dtype=torch.int32)
        self._segments: dict[int, Segments] = {}
        """by the number of tokens: all are one segment, of `_slot`"""

    @property
    def compiled(self) -> bool:
        return self._operators is not None

    def compute(self, ys: Sequence[torch.Tensor], x: torch.Tensor, slot: int, layer: int, group: int) -> None:
        """ys[p] = scale * (x @ A_p^T) @ B_p in fp32 sums, zeros where rank is 0. ys [T, d_out of p] and x [T, d_in] of
        the pool's dtype. Raises IndexError for a slot, layer or rank that the table can't have."""
        slots, layers, _ = self._rank.shape
        if not (0 <= slot < slots and 0 <= layer < layers and 0 <= group < ECHO):
            raise IndexError(
                f"no slot {slot}, layer {layer}, group {group}: the table has {slots} slots, {layers} layers"
            )
        members, (tokens, d_in) = GROUPS[GROUP_NAMES[group]], x.shape
        ranks = [int(self._rank[slot, layer, p]) for p in members]
        if not 0 <= min(ranks) <= max(ranks) <= MAX_RANK:
            names = [PROJECTIONS[p] for p in members]
            raise IndexError(f"slot {slot}, layer {layer}, {names}: ranks {ranks}, the most is {MAX_RANK}")
        work = tokens * sum(rank * (d_in + y.shape[1]) for rank, y in zip(ranks, ys, strict=True))
        if self._operators is not None and tokens < LONG_SLICE and work < LONG_WORK[x.dtype]:
            self._by_operator(ys, x, slot, layer, group)
        else:
            self._by_torch(ys, x, (slot, layer), members, ranks)

    def _by_operator(self, ys: Sequence[torch.Tensor], x: torch.Tensor, slot: int, layer: int, group: int) -> None:
        for y in ys:
            y.zero_()
        operator = self._groups.get((layer, group))
        if operator is None:
            operator = self._groups[layer, group] = self._operator(layer, group)
        self._slot[0] = slot
        operator.add(ys, x, self._segments_of(x.shape[0]))

    def _segments_of(self, tokens: int) -> Segments:
        found = self._segments.get(tokens)
        if found is None:
            start = torch.tensor([0, tokens], dtype=torch.int32)
            found = self._segments[tokens] = Segments(start, self._slot, tokens, MAX_RANK, self._widest, threads=1)
        return found

    def _operator(self, layer: int, group: int) -> CompiledGroup:
        assert self._operators is not None
        host = self._host
        members = GROUPS[GROUP_NAMES[group]]
        view = group_view(
            host.pool, host.table.rank, host.table.scale, host.table.first, host.table.row_offset, layer, members
        )
        return CompiledGroup(self._operators, view, *self._layout.group_widths(group))

    def _by_torch(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        where: tuple[int, int],
        members: Sequence[int],
        ranks: Sequence[int],
    ) -> None:
        firsts = [self._first[(*where, p)].tolist() for p in members]
        rows = [self._row_offset[a : a + rank] for (a, _), rank in zip(firsts, ranks, strict=True)]
        a = self._matrix(np.concatenate(rows), x.shape[1])
        xa, at = x.to(self.multiplied) @ a.to(self.multiplied).t(), 0
        for y, p, (_, b), rank in zip(ys, members, firsts, ranks, strict=True):
            if rank:
                rows_b = self._matrix(self._row_offset[b : b + rank], y.shape[1])
                self._put(y, xa[:, at : at + rank], rows_b, float(self._scale[(*where, p)]))
            else:
                y.zero_()
            at += rank

    def _put(self, y: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """y = scale * xa @ b. What y held, NaN too, is not even read: its lines are in the engine's cache, and come one
        by one."""
        out = y if y.dtype is self.multiplied else y.new_empty(y.shape, dtype=self.multiplied)
        out.addmm_(xa, b.to(self.multiplied), beta=0, alpha=scale)
        if out is not y:
            y.copy_(out)

    def _matrix(self, offsets: np.ndarray, width: int) -> torch.Tensor:
        """[rows, width]: a view where the rows follow each other, else a copy of their stretches, one or two more than
        page borders."""
        units = row_units(width, self._host.pool.element_size())
        step = units * self._unit
        runs = [
            self._elements.as_strided((end - low, width), (step, 1), int(offsets[low]) * self._unit)
            for low, end in contiguous_runs(offsets, units)
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs or [self._elements.new_empty(0, width)])
