"""A drawn host tier in memfds, as workers map it, with the reference's results: for tests and benchmarks.

Whatever no worker may read is NaN: the pool between rows, and the scale of projections that are not adapted.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from kernels.reference import ROW_ALIGN, add_lora
from node_agent.adapter_memory.layout import row_units
from node_agent.coldstart.host_weights import HostMap, HostWeights, attach
from node_agent.coldstart.shared import DTYPES
from node_agent.types import GROUPS

Widths = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HostCase:
    host: HostMap
    weights: HostWeights
    widths: Widths

    def expected(self, x: torch.Tensor, slot: int, layer: int, group: str) -> list[torch.Tensor]:
        """float64 [T, d_out] per projection of the group, zeros where it is not adapted."""
        table, found = self.weights, []
        for p in GROUPS[group]:
            y = torch.zeros(x.shape[0], self.widths[p][1], dtype=torch.float64)
            which = torch.full((x.shape[0],), slot, dtype=torch.int32)
            views = table.rank[:, layer, p], table.scale[:, layer, p], table.first[:, layer, p]
            add_lora(y, x, which, table.pool, *views, table.row_offset)
            found.append(y)
        return found

    def close(self) -> None:
        os.close(self.host.pool_fd)
        os.close(self.host.table_fd)


def square_widths(hidden: int, kv: int, inner: int) -> Widths:
    """Of a Llama with these sizes."""
    return (
        (hidden, hidden),
        (hidden, kv),
        (hidden, kv),
        (hidden, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    )


def draw_host(widths: Widths, ranks: np.ndarray, dtype: torch.dtype, seed: int = 0, scattered: bool = True) -> HostCase:
    """`ranks` i32[slots, layers, 7], 0 = not adapted. Rows lie in a random order when scattered."""
    generator = torch.Generator().manual_seed(seed)
    slots, layers, _ = ranks.shape
    rows = [  # in the order of AdapterLayout: a group's A rows follow each other, then its B rows
        ((slot, layer, p), side)
        for slot, layer in np.ndindex(ranks.shape[:2])
        for members in GROUPS.values()
        for side in (0, 1)
        for p in members
        for _ in range(int(ranks[slot, layer, p]))
    ]
    units = [row_units(widths[where[2]][side], dtype.itemsize) for where, side in rows]
    per_unit, size = ROW_ALIGN // dtype.itemsize, (sum(units) + 1) * ROW_ALIGN
    host = HostMap(_memfd(size), size, DTYPES.index(dtype), -1, slots, layers, max(1, len(rows)))
    host = msgspec.structs.replace(host, table_fd=_memfd(host.table_bytes))
    weights = attach(host)
    weights.pool.fill_(torch.nan)
    weights.rank.copy_(torch.from_numpy(ranks.astype(np.int32)))
    weights.scale.copy_(torch.where(weights.rank > 0, 0.5 + torch.rand(ranks.shape, generator=generator), torch.nan))
    order: Sequence[int] = torch.randperm(len(rows), generator=generator).tolist() if scattered else range(len(rows))
    at = 1
    for index in order:
        where, side = rows[index]
        width = widths[where[2]][side]
        row = torch.randn(width, generator=generator) / (int(ranks[where]) if side else width) ** 0.5
        weights.pool[at * per_unit : at * per_unit + width] = row.to(dtype)
        weights.row_offset[index] = at
        at += units[index]
    for index, (where, side) in reversed(list(enumerate(rows))):
        weights.first[(*where, side)] = index
    return HostCase(host, weights, widths)


def _memfd(size: int) -> int:
    fd = os.memfd_create("garnish-case", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    return fd
