"""The host tier's memory: one memfd, reserved whole, that other processes can map by inheritance."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from node_agent.adapter_memory.pinned import Pinned
from node_agent.adapter_memory.pool import Pool
from node_agent.device import free_memory

REGISTER_CHUNK = 256 << 20
"""Bytes that are pinned at a time: a multiple of every page size, so that no copy crosses a border."""


class HostMemory:
    """Host pool in a memfd whose pages exist from the start: a write to it never fails for want of memory.

    With `pinned`, CUDA knows it, so that copies from it run while the host works. `fd` is inheritable by choice of the
    process that passes it on; the memory lives as long as anyone maps it.
    """

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, pinned: bool) -> None:
        """Reserves as many whole pages as `size` bytes hold. Raises ValueError when the host has not that much
        memory."""
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
        """Unpins the memory and closes its descriptor. Nothing may copy from it any more."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        os.close(self.fd)

    def _map(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        if not size:
            return torch.zeros(0, dtype=dtype)
        available = available_memory()
        if size > available:  # the kernel would end a process sooner than refuse
            raise ValueError(f"host_memory: {size} bytes can't be reserved, the host has {available}; set less")
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise ValueError(f"host_memory: {size} bytes can't be reserved ({error.strerror}); set less") from error
        return torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype)


def available_memory() -> int:
    """Returns the bytes that this process may still take: of the host, and of its control group where that has a
    limit."""
    available = free_memory(torch.device("cpu"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available  # no control groups here, or those of version 1
    return available if limit == "max" else min(available, max(0, int(limit) - int(current)))
