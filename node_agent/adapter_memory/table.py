"""The AdapterTable: where kernels find an adapter's rows. Only the engine changes it, between passes."""

from __future__ import annotations

import torch

from adapters.base_model import PROJECTIONS, BaseModel
from node_agent.adapter_memory.layout import AdapterLayout, row_units
from node_agent.adapter_memory.runs import FreeRuns


class AdapterTable:
    """On the device, at a fixed address.

    rank i32[slots, layers, 7] (0 = not adapted), scale f32[same], first i32[slots, layers, 7, 2]: index into row_offset
    of the first A and the first B row; row_offset i32[rows], in ROW_ALIGN units from the pool's start, one run per
    adapter.
    """

    def __init__(self, slots: int, rows: int, base: BaseModel, device: torch.device, itemsize: int) -> None:
        shape = (slots, base.num_layers, len(PROJECTIONS))
        self.base, self.itemsize = base, itemsize
        self.rank = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scale = torch.zeros(shape, dtype=torch.float32, device=device)
        self.first = torch.zeros((*shape, 2), dtype=torch.int32, device=device)
        self.row_offset = torch.zeros(rows, dtype=torch.int32, device=device)
        self._runs = FreeRuns(rows)

    def reserve(self, rows: int) -> int | None:
        """Start of a run of `rows` entries of row_offset, or None."""
        return self._runs.take(rows)

    def set(self, slot: int, run: int, start: int, layout: AdapterLayout) -> None:
        """Switch an adapter in: its bytes begin at unit `start`, its rows at entry `run`."""
        shape = self.rank.shape[1:]
        rank = torch.zeros(shape, dtype=torch.int32)
        scale = torch.zeros(shape, dtype=torch.float32)
        first = torch.zeros((*shape, 2), dtype=torch.int32)
        offsets: list[torch.Tensor] = []
        at = run
        for layer, pairs in enumerate(layout.layers):
            for pair in pairs:
                where = (layer, pair.projection)
                rank[where], scale[where] = pair.rank, pair.scale
                for side, begin in enumerate((pair.a, pair.b)):
                    units = row_units(self.base.widths[pair.projection][side], self.itemsize)
                    first[layer, pair.projection, side] = at
                    offsets.append(start + begin + torch.arange(pair.rank, dtype=torch.int32) * units)
                    at += pair.rank
        self.rank[slot].copy_(rank)
        self.scale[slot].copy_(scale)
        self.first[slot].copy_(first)
        self.row_offset[run : run + layout.rows].copy_(torch.cat(offsets))

    def clear(self, slot: int, run: int, rows: int) -> None:
        """Switch the slot's adapter out and give its run back."""
        self.rank[slot].zero_()
        self._runs.give(run, rows)
