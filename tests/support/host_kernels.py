"""A handoff's operations on a CPU, in the place of the kernels of handoff.cu."""

from __future__ import annotations

import torch

from kernels.handoff import LINE, NumpyFlags
from kernels.handoff_device import Signal


class HostKernels:
    """StreamKernels for tensors in host memory. The stream is the caller: each operation has run when it returns."""

    def __init__(self) -> None:
        self._flags = NumpyFlags()

    def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, signal: Signal) -> None:
        if not int(signal.poisoned):
            target.copy_(x)
            for flag, value in _awaited(signal):
                self._flags.post(flag, value)

    def wait(self, signal: Signal, timeout_ns: int, failed: torch.Tensor) -> None:
        for flag, value in _awaited(signal):
            if not int(signal.poisoned) and not self._flags.wait(flag, value, timeout_ns):
                signal.poisoned.fill_(1)
                failed.fill_(1)


def _awaited(signal: Signal) -> list[tuple[int, int]]:
    """Returns the address and the value of each flag whose value is not 0."""
    first, values = signal.flags.data_ptr(), signal.values[:, 0].tolist()
    return [(first + worker * LINE, value) for worker, value in enumerate(values) if value]
