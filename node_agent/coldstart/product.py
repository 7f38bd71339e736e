"""Computes a CPU LoRA worker's part on one core: scale * x A B of its tokens, for each projection of a group.

Workers that split the weights compute in two steps: `shrink` with some rows of A, then `expand` with some columns of B.
"""

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
from node_agent.coldstart.shared import ECHO, GROUP_NAMES, MAX_RANK, Layout
from node_agent.coldstart.slices import by_projection
from node_agent.types import GROUPS

log = logging.getLogger(__name__)

LONG_WORK = {torch.float32: 3 << 19, torch.bfloat16: 3 << 20, torch.float16: 3 << 20}
"""Tokens times elements of A and B from which a slice is computed by torch's matrix products, by dtype. Set by hand,
without a report."""
LONG_SLICE = 64
"""Number of tokens of a slice from which torch's matrix products are always used."""


class Product:
    """Operators for all layers and groups of a host table. They read only rows that the table names."""

    def __init__(self, host: HostView, layout: Layout, compiled: bool = True) -> None:
        """Prepares the operators. `compiled`: use the compiled operator for short slices, if there is a compiler;
        otherwise torch computes all slices."""
        self._host, self._layout = host, layout
        self._elements, self._unit = host.pool, ROW_ALIGN // host.pool.element_size()
        # numpy views of the table: single reads through torch take longer than small products
        table = host.table
        self._rank, self._scale = table.rank.numpy(), table.scale.numpy()
        self._first, self._row_offset = table.first.numpy(), table.row_offset.numpy()
        warning = "a CPU worker runs without the compiled operator, more slowly"
        self._operators = unless_uncompiled(load_operators, log, warning) if compiled else None
        bf16 = host.pool.dtype is torch.bfloat16 and multiplies_bf16()
        self.multiplied = torch.bfloat16 if bf16 else torch.float32
        """dtype of torch's products. A node's slices have few lengths, so oneDNN has bf16 kernels for them prepared.
        Without bf16 instructions, bf16 takes many times as long as fp32 (docs/design/cold-start.md). fp16 is always
        multiplied in fp32: few processors support it, and x A^T could overflow."""
        self._groups: dict[tuple[int, int], CompiledGroup] = {}
        self._widest = max(d_in for d_in, _ in layout.widths)
        self._slot = torch.zeros(1, dtype=torch.int32)
        self._segments: dict[int, Segments] = {}
        """segments by number of tokens; all tokens form one segment of `_slot`"""

    @property
    def compiled(self) -> bool:
        return self._operators is not None

    def compute(self, ys: Sequence[torch.Tensor], x: torch.Tensor, slot: int, layer: int, group: int) -> None:
        """Computes ys[p] = scale * (x @ A_p^T) @ B_p with fp32 sums; zeros where the rank is 0. ys [T, d_out of p] and
        x [T, d_in] are in the pool's dtype. Raises IndexError for a slot, layer or rank outside the table."""
        members, ranks, (tokens, d_in) = GROUPS[GROUP_NAMES[group]], self.ranks(slot, layer, group), x.shape
        if self._is_short(tokens, sum(rank * (d_in + y.shape[1]) for rank, y in zip(ranks, ys, strict=True))):
            for y in ys:
                y.zero_()
            self._operator(slot, layer, group).add(ys, x, self._segments_of(tokens))
        else:
            self._by_torch(ys, x, (slot, layer), members, ranks)

    def ranks(self, slot: int, layer: int, group: int) -> list[int]:
        """Returns the ranks of the group's projections. Raises IndexError like `compute`."""
        slots, layers, _ = self._rank.shape
        if not (0 <= slot < slots and 0 <= layer < layers and 0 <= group < ECHO):
            raise IndexError(
                f"no slot {slot}, layer {layer}, group {group}: the table has {slots} slots, {layers} layers"
            )
        members = GROUPS[GROUP_NAMES[group]]
        ranks = [int(self._rank[slot, layer, p]) for p in members]
        if not 0 <= min(ranks) <= max(ranks) <= MAX_RANK:
            names = [PROJECTIONS[p] for p in members]
            raise IndexError(f"slot {slot}, layer {layer}, {names}: ranks {ranks}; the maximum is {MAX_RANK}")
        return ranks

    def shrink(
        self, xa: torch.Tensor, x: torch.Tensor, slot: int, layer: int, group: int, rows: tuple[int, int]
    ) -> None:
        """Computes xa[:, p, j] = x @ A_p[j] for the rows (first, end) of A, numbered through the projections. Writes
        each of these values once, and nothing else of xa f32[T, P, MAX_RANK]. x is as for `compute`. Raises IndexError
        like `compute`."""
        (tokens, d_in), (begin, end) = x.shape, rows
        ranks = self.ranks(slot, layer, group)
        if begin == end:
            return
        if self._is_short(tokens, 2 * (end - begin) * d_in):
            self._operator(slot, layer, group).shrink(xa, x, self._segments_of(tokens), begin, end)
            return
        parts = by_projection(begin, end, ranks)
        firsts = [int(self._first[slot, layer, p, 0]) for p in GROUPS[GROUP_NAMES[group]]]
        offsets = [self._row_offset[a + low : a + high] for a, (low, high) in zip(firsts, parts, strict=True)]
        a, at = self._matrix(np.concatenate(offsets), d_in), 0
        shrunk = x.to(self.multiplied) @ a.to(self.multiplied).t()
        for p, (low, high) in enumerate(parts):
            xa[:, p, low:high] = shrunk[:, at : at + high - low]
            at += high - low

    def expand(
        self,
        ys: Sequence[torch.Tensor],
        xa: torch.Tensor,
        slot: int,
        layer: int,
        group: int,
        columns: tuple[int, int],
    ) -> None:
        """Computes ys[p][:, c] = scale * xa[:, p] @ B_p[:, c] for the outputs (first, end).

        Outputs are numbered through the projections; they are zeros where the rank is 0. Writes nothing else of
        ys. ys is as for `compute`, xa as written by `shrink`. Raises IndexError like `compute`.
        """
        tokens, members, ranks = xa.shape[0], GROUPS[GROUP_NAMES[group]], self.ranks(slot, layer, group)
        parts = by_projection(*columns, [y.shape[1] for y in ys])
        elements = sum(rank * (high - low) for rank, (low, high) in zip(ranks, parts, strict=True))
        short = self._is_short(tokens, 2 * elements)
        for i, (y, p, rank, (low, high)) in enumerate(zip(ys, members, ranks, parts, strict=True)):
            if short or not rank:
                y[:, low:high].zero_()
            elif low < high:
                b = int(self._first[slot, layer, p, 1])
                rows_b = self._matrix(self._row_offset[b : b + rank], y.shape[1])[:, low:high]
                scale = float(self._scale[slot, layer, p])
                self._put(y[:, low:high], xa[:, i, :rank].to(self.multiplied), rows_b, scale)
        if short and elements:
            self._operator(slot, layer, group).expand(ys, xa, self._segments_of(tokens), *columns)

    def _is_short(self, tokens: int, elements: int) -> bool:
        """Returns whether the compiled operator computes a slice of this size: it exists and is faster than torch."""
        if self._operators is None or tokens >= LONG_SLICE:
            return False
        return tokens * elements < LONG_WORK[self._host.pool.dtype]

    def _segments_of(self, tokens: int) -> Segments:
        segments = self._segments.get(tokens)
        if segments is None:
            start = torch.tensor([0, tokens], dtype=torch.int32)
            segments = self._segments[tokens] = Segments(start, self._slot, tokens, MAX_RANK, self._widest, threads=1)
        return segments

    def _operator(self, slot: int, layer: int, group: int) -> CompiledGroup:
        """Returns the compiled operator of a layer and group, prepared for the adapter in this slot."""
        self._slot[0] = slot
        operator = self._groups.get((layer, group))
        if operator is None:
            operator = self._groups[layer, group] = self._make_operator(layer, group)
        return operator

    def _make_operator(self, layer: int, group: int) -> CompiledGroup:
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
        """Computes y = scale * xa @ b. Does not read y's old content, which may be NaN and whose cache lines are slow
        to fetch from the engine's core."""
        out = y if y.dtype is self.multiplied else y.new_empty(y.shape, dtype=self.multiplied)
        out.addmm_(xa, b.to(self.multiplied), beta=0, alpha=scale)
        if out is not y:
            y.copy_(out)

    def _matrix(self, offsets: np.ndarray, width: int) -> torch.Tensor:
        """Returns the adapter rows at these offsets as one matrix [rows, width]. It is a view if they are contiguous,
        else a copy. The copy has few runs: one or two more than page borders."""
        units = row_units(width, self._host.pool.element_size())
        step = units * self._unit
        runs = [
            self._elements.as_strided((end - low, width), (step, 1), int(offsets[low]) * self._unit)
            for low, end in contiguous_runs(offsets, units)
        ]
        return runs[0] if len(runs) == 1 else torch.cat(runs or [self._elements.new_empty(0, width)])
