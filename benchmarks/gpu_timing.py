"""Times of single GPU calls."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""More than any cache in use"""
ROUNDS = 15


def gpu_seconds(run: Callable[[], object]) -> float:
    """Median of a call's seconds by CUDA events, the cache flushed before every call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    run()
    times: list[float] = []
    for _ in range(ROUNDS):
        flush.fill_(1)
        begin, end = _event(), _event()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _event() -> Any:
    """torch's events are not typed."""
    make: Any = torch.cuda.Event
    return make(enable_timing=True)
