"""Host memory for other processes: the memfds of the pool and the host table, and how to map them.

A CPU LoRA worker receives a HostMap as JSON and inherits the two descriptors. It reads the table rows of a slot only
while the engine holds the adapter for it (`AdapterStore.hold_host`). It reads only layers that the engine names, since
only the engine knows which have arrived.
"""

from __future__ import annotations

import mmap
import os
import warnings
from dataclasses import dataclass

import msgspec
import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.host_memory import HostMemory
from node_agent.adapter_memory.layout import ROW_ALIGN
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.table import AdapterTable, TableShape, rows_for
from node_agent.device import DTYPES

MAX_ADAPTERS = 1024
"""Maximum slots of the host table. A pool with fewer pages has one slot per page."""


class HostMap(msgspec.Struct, frozen=True):
    """Descriptors and shapes with which another process maps the host pool and its table. The process must have
    inherited the descriptors under the same numbers."""

    pool_fd: int
    pool_bytes: int
    page_bytes: int
    dtype: str
    """float32, float16 or bfloat16"""
    table_fd: int
    slots: int
    layers: int
    rows: int
    """number of rows of the host table (TableShape)"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class HostView:
    """Read-only views of the host pool and its table, for a worker."""

    pool: torch.Tensor
    """flat tensor of the pool's dtype"""
    table: AdapterTable


def attach(host_map: HostMap) -> HostView:
    """Maps the host pool and its table. Raises OSError or ValueError when the descriptors do not match the shapes.

    The process needs no GPU and may close the descriptors afterwards.
    """
    shape = TableShape(host_map.slots, host_map.layers, host_map.rows)
    pool = _map(host_map.pool_fd, host_map.pool_bytes, host_map.torch_dtype)
    memory = _map(host_map.table_fd, 4 * shape.words, torch.int32)
    table = AdapterTable(shape.slots, shape.rows, shape.layers, torch.device("cpu"), memory)
    return HostView(pool, table)


class SharedTable:
    """AdapterTable of the host pool, in its own memfd that is fully reserved."""

    def __init__(self, pool: Pool, base: BaseModel) -> None:
        """Creates the table for an adapter pool. Raises ValueError when memory is short, or when the pool is too large
        for the table's offsets."""
        units, itemsize = pool.pages.count * pool.page_units, pool.data.element_size()
        if units >= 1 << 31:
            raise ValueError(
                f"host_memory: {pool.size} bytes are more than the {(1 << 31) * ROW_ALIGN} that can be addressed"
            )
        slots = max(1, min(MAX_ADAPTERS, pool.pages.count))
        self.shape = TableShape(slots, base.num_layers, max(1, rows_for(units, base, itemsize)))
        size = 4 * self.shape.words
        self.fd = os.memfd_create("garnish-host-table", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, size)
            memory = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.int32)
        except OSError as error:
            os.close(self.fd)
            raise ValueError(f"host_memory: its table takes {size} bytes more ({error.strerror}); set less") from error
        self.table = AdapterTable(slots, self.shape.rows, base.num_layers, torch.device("cpu"), memory)

    def close(self) -> None:
        os.close(self.fd)


def export(memory: HostMemory, table: SharedTable) -> HostMap:
    """Returns the HostMap that `attach` takes in another process."""
    pool, shape = memory.pool, table.shape
    dtype = str(pool.data.dtype).removeprefix("torch.")
    return HostMap(memory.fd, pool.data.nbytes, pool.page_size, dtype, table.fd, shape.slots, shape.layers, shape.rows)


def _map(fd: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    if os.fstat(fd).st_size != size:
        raise ValueError(f"shared memory of {os.fstat(fd).st_size} bytes, expected {size}")
    if not size:
        return torch.zeros(0, dtype=dtype)
    memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    with warnings.catch_warnings():  # torch warns that the memory is read-only, which is intended
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=dtype)
