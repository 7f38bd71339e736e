"""What a CPU LoRA worker computes: scale * x A B of its tokens for every projection of a group, on one core."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from adapters.base_model import PROJECTIONS
from kernels.build import CompileError
from kernels.compiled import CompiledGroup, Operators, load_operators
from kernels.reference import ROW_ALIGN
from kernels.view import group_view
from node_agent.adapter_memory.host_map import HostView
from node_agent.adapter_memory.layout import row_units
from node_agent.coldstart.shared import ECHO, GROUP_NAMES, Layout
from node_agent.types import GROUPS

log = logging.getLogger(__name__)

LONG_SLICE = 32
"""Tokens from which on torch's matrix products are faster than the compiled operator."""
MAX_RANK = 512
"""As adapters/validate.py: no projection has more."""


class Product:
    """`add` for every layer and group. Only rows that the table names are read."""

    def __init__(self, host: HostView, layout: Layout, compiled: bool = True) -> None:
        """Without `compiled`, or where there is no compiler, torch computes short slices too."""
        self._host, self._layout = host, layout
        self._units = host.pool.view(-1, ROW_ALIGN // host.pool.element_size())
        self._operators = _operators() if compiled else None
        self._groups: dict[tuple[int, int], CompiledGroup] = {}
        widest = max(d_in for d_in, _ in layout.widths)
        self._wide = torch.zeros(LONG_SLICE * widest)
        self._xa = torch.zeros(LONG_SLICE * 3 * MAX_RANK)
        self._slot = torch.zeros(1, dtype=torch.int32)
        self._start = torch.zeros(2, dtype=torch.int32)

    @property
    def compiled(self) -> bool:
        return self._operators is not None

    def compute(self, ys: Sequence[torch.Tensor], x: torch.Tensor, slot: int, layer: int, group: int) -> None:
        """ys[p] = scale * (x @ A_p^T) @ B_p in fp32 sums, zeros where rank is 0. ys [T, d_out of p] and x [T, d_in] of
        the pool's dtype. Raises IndexError for a slot, layer or rank that the table can't have."""
        slots, layers, _ = self._host.table.rank.shape
        if not (0 <= slot < slots and 0 <= layer < layers and 0 <= group < ECHO):
            raise IndexError(
                f"no slot {slot}, layer {layer}, group {group}: the table has {slots} slots, {layers} layers"
            )
        if self._operators is not None and len(x) < LONG_SLICE:
            self._by_operator(ys, x, slot, layer, group)
            return
        for y, p in zip(ys, GROUPS[GROUP_NAMES[group]], strict=True):
            self._by_torch(y, x, slot, layer, p)

    def _by_operator(self, ys: Sequence[torch.Tensor], x: torch.Tensor, slot: int, layer: int, group: int) -> None:
        for y in ys:
            y.zero_()
        operator = self._groups.get((layer, group))
        if operator is None:
            operator = self._groups[layer, group] = self._operator(layer, group)
        tokens, d_in = x.shape
        self._slot[0], self._start[1] = slot, tokens
        xa = self._xa[: tokens * len(ys) * MAX_RANK].view(tokens, len(ys), MAX_RANK)
        wide = self._wide[: tokens * d_in].view(tokens, d_in)
        operator.add(ys, x, self._start, self._slot, xa, wide, 1)

    def _operator(self, layer: int, group: int) -> CompiledGroup:
        assert self._operators is not None
        host = self._host
        members = GROUPS[GROUP_NAMES[group]]
        view = group_view(
            host.pool, host.table.rank, host.table.scale, host.table.first, host.table.row_offset, layer, members
        )
        return CompiledGroup(self._operators, view, *self._layout.group_widths(group))

    def _by_torch(self, y: torch.Tensor, x: torch.Tensor, slot: int, layer: int, projection: int) -> None:
        host = self._host
        rank = int(host.table.rank[slot, layer, projection])
        if not rank:
            y.zero_()
            return
        if not 0 < rank <= MAX_RANK:
            where = f"slot {slot}, layer {layer}, {PROJECTIONS[projection]}"
            raise IndexError(f"{where}: rank {rank}, the most is {MAX_RANK}")
        a_first, b_first = host.table.first[slot, layer, projection].tolist()
        a = self._matrix(a_first, rank, x.shape[1])
        b = self._matrix(b_first, rank, y.shape[1])
        y.addmm_(x @ a.t(), b, beta=0, alpha=float(host.table.scale[slot, layer, projection]))

    def _matrix(self, first: int, rank: int, width: int) -> torch.Tensor:
        """[rank, width]: a view where the rows follow each other, a copy where they are scattered over pages."""
        offsets = self._host.table.row_offset[first : first + rank]
        units = row_units(width, self._host.pool.element_size())
        start, end = int(offsets[0]), int(offsets[-1])
        if end - start == (rank - 1) * units and bool((offsets.diff() == units).all()):
            return self._units[start : start + rank * units].view(rank, -1)[:, :width]
        index = offsets.long()[:, None] + torch.arange(units)
        return self._units[index].view(rank, -1)[:, :width]


def _operators() -> Operators | None:
    try:
        return load_operators()
    except CompileError as error:
        log.warning("a CPU worker runs without the compiled operator, more slowly", extra={"reason": str(error)})
        return None
