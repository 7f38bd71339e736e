"""A drawn host tier in memfds, as workers map it, with the reference's results: for tests and benchmarks.

Whatever no worker may read is NaN: the pool between rows, and the scale of projections that are not adapted.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.reference import add_group
from kernels.view import ROW_ALIGN, GroupView
from node_agent.adapter_memory.host_map import HostMap, HostView
from node_agent.adapter_memory.layout import row_units
from node_agent.adapter_memory.table import AdapterTable, TableShape
from node_agent.types import GROUPS

Widths = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class HostCase:
    host: HostMap
    weights: HostView
    widths: Widths

    def expected(self, x: torch.Tensor, slot: int, layer: int, group: str) -> list[torch.Tensor]:
        """float64 [T, d_out] per projection of the group, zeros where it is not adapted."""
        table, members = self.weights.table, list(GROUPS[group])
        views = table.rank[:, layer, members], table.scale[:, layer, members], table.first[:, layer, members]
        found = [torch.zeros(x.shape[0], self.widths[p][1], dtype=torch.float64) for p in members]
        which = torch.full((x.shape[0],), slot, dtype=torch.int32)
        add_group(found, x, which, GroupView(self.weights.pool, *views, table.row_offset))
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
    shape = TableShape(slots, layers, max(1, len(rows)))
    (pool_fd, pool), (table_fd, words) = _memfd(size, dtype), _memfd(4 * shape.words, torch.int32)
    table = AdapterTable(slots, shape.rows, layers, torch.device("cpu"), words)
    host = HostMap(pool_fd, size, size, str(dtype).removeprefix("torch."), table_fd, slots, layers, shape.rows)
    pool.fill_(torch.nan)
    table.rank.copy_(torch.from_numpy(ranks.astype(np.int32)))
    table.scale.copy_(torch.where(table.rank > 0, 0.5 + torch.rand(ranks.shape, generator=generator), torch.nan))
    order: Sequence[int] = torch.randperm(len(rows), generator=generator).tolist() if scattered else range(len(rows))
    at = 1
    for index in order:
        where, side = rows[index]
        width = widths[where[2]][side]
        row = torch.randn(width, generator=generator) / (int(ranks[where]) if side else width) ** 0.5
        pool[at * per_unit : at * per_unit + width] = row.to(dtype)
        table.row_offset[index] = at
        at += units[index]
    for index, (where, side) in reversed(list(enumerate(rows))):
        table.first[(*where, side)] = index
    return HostCase(host, HostView(pool, table), widths)


def _memfd(size: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    fd = os.memfd_create("garnish-case", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, size)
    return fd, torch.frombuffer(mmap.mmap(fd, size), dtype=dtype)
