"""Times of single GPU calls."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

FLUSH_BYTES = 512 << 20
ROUNDS = 15


def gpu_seconds(run: Callable[[], object]) -> float:
    """Median of a call's seconds by CUDA events, the cache flushed before every call. The call is captured and replayed
    where it can be: launching its kernels one by one may take longer than they do."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    launch = _captured(run)
    times: list[float] = []
    for _ in range(ROUNDS):
        flush.fill_(1)
        begin, end = _event(), _event()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:  # another project's code may wait for the device
        return run
    return graph.replay


def _event() -> Any:
    """torch's events are not typed."""
    make: Any = torch.cuda.Event
    return make(enable_timing=True)
