"""The device's queue of work as `node.runner: cuda` uses it: copies each way, captured work, events, and no waiting.

Everything that a pass does passes through here, so that a test can put a queue in its place that runs late.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from node_agent.device import Event, record_event

Work = Callable[[], None]

WARM_UP_RUNS = 2
"""Before a capture: kernels are compiled, and libraries take their workspaces, outside it."""


class Stream:
    """In order: what is enqueued later runs later. No method waits for the device.

    This one is a CPU's: work has run when the call returns, and captured work is the work itself.
    """

    device = torch.device("cpu")

    def host(self, size: int) -> torch.Tensor:
        """Returns u8[size] in host memory that the device can copy from and to while the host goes on."""
        return torch.empty(size, dtype=torch.uint8)

    def empty(self, size: int) -> torch.Tensor:
        """Returns u8[size] on the device."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def upload(self, device: torch.Tensor, host: torch.Tensor, size: int) -> None:
        """Enqueues a copy of the first `size` bytes, which must stay as they are until it has run."""
        device[:size].copy_(host[:size], non_blocking=True)

    def download(self, host: torch.Tensor, device: torch.Tensor, size: int) -> None:
        """Enqueues a copy of the first `size` bytes."""
        host[:size].copy_(device[:size], non_blocking=True)

    def enqueue(self, work: Work) -> None:
        """Enqueues work that is not captured, operation by operation."""
        work()

    def capture(self, work: Work) -> Work:
        """Returns what enqueues `work` again, on the same addresses."""
        return work

    def event(self) -> Event:
        """Returns an event behind all that is enqueued."""
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
        # other threads may use the device meanwhile: only this one's calls are captured. A capture that fails leaves
        # its own stream behind as the current one; the outer block has the right one back
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()
        return graph.replay


def open_stream(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else Stream()
