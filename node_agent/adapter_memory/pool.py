"""The device's adapter pool: one allocation, cut into contiguous runs."""

from __future__ import annotations

import torch

from node_agent.adapter_memory.layout import ROW_ALIGN
from node_agent.adapter_memory.runs import FreeRuns


class Pool:
    """Runs are counted in ROW_ALIGN units. `data` is flat, of the pool's dtype."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.units = size // ROW_ALIGN
        self.data = torch.zeros(self.units * ROW_ALIGN // dtype.itemsize, dtype=dtype, device=device)
        self._runs = FreeRuns(self.units)
        self._used: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return self._runs.free * ROW_ALIGN

    @property
    def size(self) -> int:
        return self.units * ROW_ALIGN

    def allocate(self, size: int) -> int | None:
        """Start (in units) of a run of `size` bytes, or None when no free run is long enough."""
        need = max(1, -(-size // ROW_ALIGN))
        start = self._runs.take(need)
        if start is not None:
            self._used[start] = need
        return start

    def release(self, start: int) -> None:
        self._runs.give(start, self._used.pop(start))

    def elements(self, start: int, end: int) -> torch.Tensor:
        """The flat elements of units start..end."""
        per_unit = ROW_ALIGN // self.data.element_size()
        return self.data[start * per_unit : end * per_unit]

    def matrix(self, start: int, rows: int, width: int) -> torch.Tensor:
        """A view [rows, width] of rows that begin at unit `start`, each at a multiple of ROW_ALIGN bytes."""
        per_unit = ROW_ALIGN // self.data.element_size()
        stride = -(-width // per_unit) * per_unit
        return self.data.as_strided((rows, width), (stride, 1), start * per_unit)
