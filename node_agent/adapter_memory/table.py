"""The AdapterTable: where kernels find an adapter's rows. Only the engine changes it, between passes.

That a slot names an adapter says where its rows belong, not that they are there: AdapterStore knows which layers are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from adapters.base_model import PROJECTIONS, BaseModel
from node_agent.adapter_memory.layout import AdapterLayout, row_units
from node_agent.adapter_memory.runs import FreeRuns


@dataclass(frozen=True)
class TableShape:
    """Size of a table, and the places of its parts: rank, scale, first and row_offset, one after the other."""

    slots: int
    layers: int
    rows: int

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The 32-bit words of each part: rank, scale, first, row_offset."""
        pairs = self.slots * self.layers * len(PROJECTIONS)
        return pairs, pairs, 2 * pairs, self.rows

    @property
    def words(self) -> int:
        return sum(self.parts)


class AdapterTable:
    """Ranks, scales and row places of the adapters in a pool, at a fixed address on the device or in shared memory.

    rank i32[slots, layers, 7] (0 = not adapted), scale f32[same], first i32[slots, layers, 7, 2]: index into row_offset
    of the first A and the first B row; row_offset i32[rows], in ROW_ALIGN units from the pool's start, one run per
    adapter.
    """

    def __init__(
        self, slots: int, rows: int, num_layers: int, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """Lays the table in `memory`, i32[TableShape.words], which is taken as it is; None: in zeroed memory of its
        own."""
        self.shape = TableShape(slots, num_layers, rows)
        if memory is None:
            memory = torch.zeros(self.shape.words, dtype=torch.int32, device=device)
        rank, scale, first, self.row_offset = torch.split(memory, list(self.shape.parts))
        pairs = (slots, num_layers, len(PROJECTIONS))
        self.rank, self.scale = rank.view(pairs), scale.view(torch.float32).view(pairs)
        self.first = first.view(*pairs, 2)
        self._runs = FreeRuns(rows)

    def reserve(self, rows: int) -> int | None:
        """Reserves a run of `rows` entries of row_offset. Returns its start, or None when there is no such run."""
        return self._runs.take(rows)

    def set(self, slot: int, run: int, layout: AdapterLayout, positions: np.ndarray) -> None:
        """Switches an adapter in: its rows are at `positions` (i64[rows], pool units), their entries begin at `run`. On
        a device with a stream this is enqueued there, and nobody waits for what runs before it."""
        _send(self.scale[slot], layout.scale)
        _send(self.first[slot], layout.first + np.int32(run))
        _send(self.row_offset[run : run + layout.rows], positions.astype(np.int32))
        _send(self.rank[slot], layout.rank)

    def clear(self, slot: int, run: int, rows: int) -> None:
        """Switches the slot's adapter out and gives its run back."""
        self.rank[slot].zero_()
        self.give(run, rows)

    def give(self, run: int, rows: int) -> None:
        """Gives back a run that was reserved and is not used, or not any more."""
        self._runs.give(run, rows)


def _send(target: torch.Tensor, values: np.ndarray) -> None:
    """Copies values of the target's shape and type. To a GPU they go by pinned memory: a copy from any other would wait
    for all that is enqueued."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def rows_for(pool_units: int, base: BaseModel, itemsize: int) -> int:
    """Returns the entries of row_offset for a full pool: twice what the narrowest projection needs, since runs
    fragment."""
    pairs = [row_units(d_in, itemsize) + row_units(d_out, itemsize) for d_in, d_out in base.widths]
    return 2 * (2 * pool_units // min(pairs))
