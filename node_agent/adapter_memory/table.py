"""The AdapterTable: where kernels find an adapter's rows. Only the engine changes it, between passes."""

from __future__ import annotations

import numpy as np
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

    def __init__(self, slots: int, rows: int, num_layers: int, device: torch.device) -> None:
        shape = (slots, num_layers, len(PROJECTIONS))
        self.rank = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scale = torch.zeros(shape, dtype=torch.float32, device=device)
        self.first = torch.zeros((*shape, 2), dtype=torch.int32, device=device)
        self.row_offset = torch.zeros(rows, dtype=torch.int32, device=device)
        self._runs = FreeRuns(rows)

    def reserve(self, rows: int) -> int | None:
        """Start of a run of `rows` entries of row_offset, or None."""
        return self._runs.take(rows)

    def set(self, slot: int, run: int, layout: AdapterLayout, positions: np.ndarray) -> None:
        """Switch an adapter in: its rows are at `positions` (i64[rows], pool units), their entries begin at `run`."""
        self.scale[slot].copy_(torch.from_numpy(layout.scale))
        self.first[slot].copy_(torch.from_numpy(layout.first + np.int32(run)))
        self.row_offset[run : run + layout.rows].copy_(torch.from_numpy(positions.astype(np.int32)))
        self.rank[slot].copy_(torch.from_numpy(layout.rank))

    def clear(self, slot: int, run: int, rows: int) -> None:
        """Switch the slot's adapter out and give its run back."""
        self.rank[slot].zero_()
        self._runs.give(run, rows)


def rows_for(pool_units: int, base: BaseModel, itemsize: int) -> int:
    """Entries of row_offset for a full pool: twice what the narrowest projection needs, since runs fragment."""
    pairs = [row_units(d_in, itemsize) + row_units(d_out, itemsize) for d_in, d_out in base.widths]
    return 2 * (2 * pool_units // min(pairs))
