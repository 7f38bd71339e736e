"""Host memory that a CUDA process registers, so that the device reads and writes it without the host's help."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Pinned:
    """Registered ranges of memory that somebody else owns; `close` before that one unmaps it.

    A copy of the device's copy engine must lie within one range: register what is copied at once as one.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Registers ranges (address, bytes) of host memory with CUDA. Raises RuntimeError, nothing registered, when
        CUDA refuses one."""
        self._addresses: list[int] = []
        try:
            for address, size in ranges:
                _check(_cuda().cudaHostRegister(address, size, 0), f"{size} bytes of host memory can't be pinned")
                self._addresses.append(address)
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Unregisters the memory. The device is done with it."""
        while self._addresses:
            _check(_cuda().cudaHostUnregister(self._addresses.pop()), "host memory can't be unpinned")


def _check(status: Any, what: str) -> None:
    if int(status):
        raise RuntimeError(f"{what}: CUDA error {int(status)}")


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
