"""Ordered queue of work on the device for `node.runner: cuda`: copies to and from the device, captured work, events.

The caller never waits for the device. All work of a pass goes through this queue, so that tests can substitute a queue
that runs late.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from node_agent.device import record_event
from node_agent.device_event import Event

Work = Callable[[], None]

WARM_UP_RUNS = 2
"""Number of runs before a capture, in which kernels are compiled and libraries allocate workspaces."""


class Stream:
    """Ordered queue of work. No method waits for the device.

    This class is for a CPU: work has run when the call returns, and captured work is the function itself.
    """

    device = torch.device("cpu")

    def host(self, size: int) -> torch.Tensor:
        """Allocates u8[size] in host memory for asynchronous copies."""
        return torch.empty(size, dtype=torch.uint8)

    def empty(self, size: int) -> torch.Tensor:
        """Allocates u8[size] on the device."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def upload(self, device: torch.Tensor, host: torch.Tensor, size: int) -> None:
        """Enqueues a copy of the first `size` bytes to the device. The host's bytes must not change until it has
        run."""
        device[:size].copy_(host[:size], non_blocking=True)

    def download(self, host: torch.Tensor, device: torch.Tensor, size: int) -> None:
        """Enqueues a copy of the first `size` bytes to the host."""
        host[:size].copy_(device[:size], non_blocking=True)

    def enqueue(self, work: Work) -> None:
        """Enqueues work that is not captured, operation by operation."""
        work()

    def capture(self, work: Work) -> Work:
        """Returns a function that enqueues `work` again, on the same addresses."""
        return work

    def event(self) -> Event:
        """Returns an event after all enqueued work."""
        return record_event(self.device)


class CudaStream(Stream):
    """The current stream of a GPU, pinned host memory, and CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def capture(self, work: Work) -> Work:
        current = torch.cuda.current_stream(self.device)
        side: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local, since other threads may use the device meanwhile. A capture that fails leaves its stream as the
        # current one; the outer context restores the right one
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay


def open_stream(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else Stream()
