"""Host memory registered with CUDA, for asynchronous access by the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Pinned:
    """Ranges of host memory that are registered with CUDA; the caller owns the memory. `close` must be called before
    the memory is unmapped. A copy by the device's copy engine must lie within one range."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Registers ranges (address, bytes) of host memory with CUDA. Raises RuntimeError, with nothing registered,
        when CUDA refuses one."""
        self._addresses: list[int] = []
        try:
            for address, size in ranges:
                _check(_cuda().cudaHostRegister(address, size, 0), f"{size} bytes of host memory can't be pinned")
                self._addresses.append(address)
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Unregisters the memory. The device must no longer use it."""
        while self._addresses:
            _check(_cuda().cudaHostUnregister(self._addresses.pop()), "host memory can't be unpinned")


def _check(status: Any, what: str) -> None:
    if int(status):
        raise RuntimeError(f"{what}: CUDA error {int(status)}")


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
