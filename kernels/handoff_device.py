"""The two operations of a handoff that run on the engine's device, and which code does them here."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import torch

log = logging.getLogger(__name__)


class Signal(NamedTuple):
    """What the device signals to W workers, or awaits of them. Flags and values lie a cache line apart, in registered
    host memory: i64[W, 8], of which column 0 counts."""

    flags: torch.Tensor
    values: torch.Tensor
    """what the flags become; 0: nothing is signalled, or awaited"""
    poisoned: torch.Tensor
    """i32[1] on the device: set in a pass that has failed"""


class StreamKernels(Protocol):
    """Handoffs between a device and workers: both operations are enqueued on the current stream and return at once."""

    def copy_and_signal(self, x: torch.Tensor, target: torch.Tensor, ticket: torch.Tensor, signal: Signal) -> None:
        """Enqueues target = x, then flags[w] = values[w] for every worker w whose value is not 0; nothing where
        `poisoned` is set. x contiguous on the device, target of its shape in registered host memory; ticket i32[1] on
        the device, 0 before and after."""

    def wait(self, signal: Signal, timeout_ns: int, failed: torch.Tensor) -> None:
        """Has later work on the stream begin when every flag is its value, or after timeout_ns: then `poisoned` becomes
        1, and so does failed i32[1] in registered host memory. Value 0, or poisoned already: no wait."""


def stream_kernels(device: torch.device) -> StreamKernels:
    """Returns Triton's kernels where this Triton has the operations (3.9), else CUDA C++ through NVRTC. Raises
    CompileError."""
    import triton.language as tl  # a host without a GPU need not load it

    if hasattr(tl, "atomic_store") and hasattr(tl, "atomic_poll"):
        from kernels.handoff_triton import TritonKernels

        return TritonKernels()
    from kernels.handoff_cuda import CudaKernels

    log.info("handoffs go through NVRTC: this Triton has no atomic_poll")
    return CudaKernels(device)
