"""Memory of the host tier: one fully reserved memfd that other processes can inherit and map."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from node_agent.adapter_memory.pinned import Pinned
from node_agent.adapter_memory.pool import Pool
from node_agent.device import free_memory

REGISTER_CHUNK = 256 << 20
"""Bytes pinned per call: a multiple of all page sizes, so that no copy crosses a border between two registrations."""


class HostMemory:
    """Host pool in a memfd whose pages are allocated at the start. A write therefore never fails for lack of memory.

    With `pinned`, the memory is registered with CUDA, so that copies from it are asynchronous. Child processes may
    inherit `fd`. The memory lives as long as any process maps it.
    """

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, pinned: bool) -> None:
        """Reserves the whole pages that fit in `size` bytes. Raises ValueError when the host has too little memory."""
        paged_size = size // page_size * page_size
        self.fd = os.memfd_create("garnish-adapters", os.MFD_CLOEXEC)
        self._pinned: Pinned | None = None
        try:
            data = self._map(paged_size, dtype)
        except BaseException:
            os.close(self.fd)
            raise
        self.pool = Pool(data, page_size)
        if pinned and paged_size:
            start, chunks = data.data_ptr(), range(0, paged_size, REGISTER_CHUNK)
            self._pinned = Pinned((start + at, min(REGISTER_CHUNK, paged_size - at)) for at in chunks)

    def close(self) -> None:
        """Unpins the memory and closes its descriptor. No copy from it may be running."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        os.close(self.fd)

    def _map(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        if not size:
            return torch.zeros(0, dtype=dtype)
        available = available_memory()
        if size > available:  # otherwise the OOM killer would act before an allocation fails
            raise ValueError(f"host_memory: {size} bytes can't be reserved, the host has {available}; set less")
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise ValueError(f"host_memory: {size} bytes can't be reserved ({error.strerror}); set less") from error
        return torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype)


def available_memory() -> int:
    """Returns the bytes that this process may still allocate, limited by the host's free memory and the control
    group."""
    available = free_memory(torch.device("cpu"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available  # no control groups, or version 1
    return available if limit == "max" else min(available, max(0, int(limit) - int(current)))
