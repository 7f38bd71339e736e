"""The AdapterTable: positions of adapters' rows, for kernels. Only the engine changes it, between passes.

An entry says where an adapter's rows belong, not that they have arrived. AdapterStore knows which layers have.
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
    """Size of a table, and the sizes of its parts. The parts rank, scale, first and row_offset are consecutive."""

    slots: int
    layers: int
    rows: int

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Number of 32-bit words of each part: rank, scale, first, row_offset."""
        pairs = self.slots * self.layers * len(PROJECTIONS)
        return pairs, pairs, 2 * pairs, self.rows

    @property
    def words(self) -> int:
        return sum(self.parts)


class AdapterTable:
    """Ranks, scales and row positions of the adapters in a pool. It has a fixed address on the device or in shared
    memory.

    rank i32[slots, layers, 7] (0 = not adapted); scale f32[slots, layers, 7]; first i32[slots, layers, 7, 2]: index
    into row_offset of the first A and the first B row; row_offset i32[rows]: position of each row in ROW_ALIGN units
    from the pool's start, one contiguous run of entries per adapter.
    """

    def __init__(
        self, slots: int, rows: int, num_layers: int, device: torch.device, memory: torch.Tensor | None = None
    ) -> None:
        """Uses `memory`, i32[TableShape.words], with its present content; None: allocates zeroed memory."""
        self.shape = TableShape(slots, num_layers, rows)
        if memory is None:
            memory = torch.zeros(self.shape.words, dtype=torch.int32, device=device)
        rank, scale, first, self.row_offset = torch.split(memory, list(self.shape.parts))
        pairs = (slots, num_layers, len(PROJECTIONS))
        self.rank, self.scale = rank.view(pairs), scale.view(torch.float32).view(pairs)
        self.first = first.view(*pairs, 2)
        self._runs = FreeRuns(rows)

    def reserve(self, rows: int) -> int | None:
        """Reserves `rows` consecutive entries of row_offset. Returns the index of the first; None when there is no free
        run of that length."""
        return self._runs.take(rows)

    def set(self, slot: int, run: int, layout: AdapterLayout, positions: np.ndarray) -> None:
        """Enters an adapter into the table. `positions` i64[rows]: offsets of its rows from the pool's start, in
        ROW_ALIGN units; `run`: index of their first entry in row_offset. On a GPU the writes are enqueued, and the call
        does not wait."""
        _send(self.scale[slot], layout.scale)
        _send(self.first[slot], layout.first + np.int32(run))
        _send(self.row_offset[run : run + layout.rows], positions.astype(np.int32))
        _send(self.rank[slot], layout.rank)

    def clear(self, slot: int, run: int, rows: int) -> None:
        """Removes the slot's adapter and frees its run of entries."""
        self.rank[slot].zero_()
        self.give(run, rows)

    def give(self, run: int, rows: int) -> None:
        """Frees a reserved run of entries that no slot uses."""
        self._runs.give(run, rows)


def _send(target: torch.Tensor, values: np.ndarray) -> None:
    """Copies values of the target's shape and dtype. To a GPU they go through pinned memory: a copy from pageable
    memory would wait for all enqueued work."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def rows_for(pool_units: int, base: BaseModel, itemsize: int) -> int:
    """Returns the number of row_offset entries for a full pool. It is twice the number that rows of the narrowest
    projection would need, because of fragmentation."""
    pairs = [row_units(d_in, itemsize) + row_units(d_out, itemsize) for d_in, d_out in base.widths]
    return 2 * (2 * pool_units // min(pairs))
