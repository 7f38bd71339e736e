"""Host memory as other processes see it: the pool's memfd and the host table's, and how to map both.

A CPU LoRA worker gets a HostMap as JSON and the two descriptors by inheritance. It reads the rows that the table names
for a slot while the engine holds the adapter for it (`AdapterStore.hold_host`), and only layers that the engine names:
the engine knows which have arrived.
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
"""Slots of the host table; a pool of fewer pages has fewer."""


class HostMap(msgspec.Struct, frozen=True):
    """Descriptors and shapes by which another process maps the host pool and its table. The descriptors are valid in a
    process that inherited them under the same numbers."""

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
    """Read-only views of the host pool and its table, from which a worker computes."""

    pool: torch.Tensor
    """flat, of the pool's dtype"""
    table: AdapterTable


def attach(host_map: HostMap) -> HostView:
    """Maps the host pool and its table. Raises OSError or ValueError when the descriptors are not what they should be.

    The process needs no device for it, and may close the descriptors afterwards.
    """
    shape = TableShape(host_map.slots, host_map.layers, host_map.rows)
    pool = _map(host_map.pool_fd, host_map.pool_bytes, host_map.torch_dtype)
    memory = _map(host_map.table_fd, 4 * shape.words, torch.int32)
    table = AdapterTable(shape.slots, shape.rows, shape.layers, torch.device("cpu"), memory)
    return HostView(pool, table)


class SharedTable:
    """AdapterTable over the host pool, in a separate memfd that is reserved whole like the pool."""

    def __init__(self, pool: Pool, base: BaseModel) -> None:
        """Makes the table for an adapter pool. Raises ValueError without the memory, or when the table's offsets do not
        reach the pool's end."""
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
    """Returns what `attach` needs in another process."""
    pool, shape = memory.pool, table.shape
    dtype = str(pool.data.dtype).removeprefix("torch.")
    return HostMap(memory.fd, pool.data.nbytes, pool.page_size, dtype, table.fd, shape.slots, shape.layers, shape.rows)


def _map(fd: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    if os.fstat(fd).st_size != size:
        raise ValueError(f"shared memory of {os.fstat(fd).st_size} bytes, expected {size}")
    if not size:
        return torch.zeros(0, dtype=dtype)
    memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    with warnings.catch_warnings():  # torch warns that it can't be written, which is what is wanted
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=dtype)
