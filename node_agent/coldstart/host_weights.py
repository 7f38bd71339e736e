"""The host tier as a worker process sees it: the pool's bytes and the host AdapterTable, both mapped from memfds."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from adapters.base_model import PROJECTIONS
from node_agent.coldstart.shared import DTYPES


class HostMap(msgspec.Struct, frozen=True):
    """What a child process needs to map the host tier; the descriptors reach it by inheritance.

    The table's memfd holds, one after the other, rank i32[slots, layers, 7], scale f32[same], first i32[same, 2] and
    row_offset i32[rows], as in AdapterTable, with offsets into the host pool.
    """

    pool_fd: int
    pool_bytes: int
    dtype: int
    """index into shared.DTYPES"""
    table_fd: int
    slots: int
    layers: int
    rows: int

    @property
    def entries(self) -> int:
        return self.slots * self.layers * len(PROJECTIONS)

    @property
    def table_bytes(self) -> int:
        return 4 * (4 * self.entries + self.rows)


@dataclass(frozen=True)
class HostWeights:
    """Views of the mapped memory; see AdapterTable and Pool."""

    pool: torch.Tensor
    rank: torch.Tensor
    scale: torch.Tensor
    first: torch.Tensor
    row_offset: torch.Tensor


def attach(host: HostMap) -> HostWeights:
    """Map the host tier. Raises OSError or ValueError when a descriptor is not what `host` says."""
    pool = torch.frombuffer(mmap.mmap(host.pool_fd, host.pool_bytes), dtype=DTYPES[host.dtype])
    words = torch.from_numpy(np.frombuffer(mmap.mmap(host.table_fd, host.table_bytes), dtype=np.int32))
    n, shape = host.entries, (host.slots, host.layers, len(PROJECTIONS))
    rank, scale, first, row_offset = words.split_with_sizes([n, n, 2 * n, host.rows])
    return HostWeights(pool, rank.view(shape), scale.view(torch.float32).view(shape), first.view(*shape, 2), row_offset)
