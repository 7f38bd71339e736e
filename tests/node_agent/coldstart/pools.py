"""A real pool of worker processes over a drawn host tier, and what tests ask of processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from node_agent.coldstart.handoffs import Handoff
from node_agent.coldstart.shared import DTYPES, Layout
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.workers import WorkerPool
from tests.support.crowded import CORES, CrowdedPool
from tests.support.host_case import HostCase, Widths, draw_host
from tests.support.worker_counters import Counters, counters_of

WIDTHS: Widths = ((40, 33), (40, 20), (40, 20), (33, 40), (40, 70), (40, 70), (70, 40))
"""Odd ones, so that rows end inside a 64-byte unit."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
LONG = 120.0
"""Seconds that a wait in a test takes at most; reached only where something is wrong."""
MAX_TOKENS = 96


@contextlib.contextmanager
def started(
    case: HostCase,
    workers: int,
    slots: int = 3,
    stall_limit: float = LONG,
    max_tokens: int = MAX_TOKENS,
    spares: int = 0,
    takeover: float = LONG,
) -> Iterator[WorkerPool]:
    """Armed and warm. More workers than cores are left out; two share a core where there is one only."""
    layout = Layout(slots, workers, max_tokens, case.widths, DTYPES.index(case.host.torch_dtype), spares=spares)
    pool = WorkerPool(case.host, layout, CORES[:workers], stall_limit, takeover)
    try:
        pool.start()
        assert pool.wait_ready(LONG, workers + spares) == workers + spares
        pool.arm()
        yield pool
    finally:
        pool.close()


@contextlib.contextmanager
def crowded(case: HostCase, workers: int, slots: int = 3) -> Iterator[CrowdedPool]:
    """Armed and warm."""
    layout = Layout(slots, workers, MAX_TOKENS, case.widths, DTYPES.index(case.host.torch_dtype))
    pool = CrowdedPool(case.host, layout, range(workers), LONG, LONG)
    try:
        pool.start()
        assert pool.wait_ready(LONG) == workers
        pool.arm()
        yield pool
    finally:
        pool.close()


def drawn_case(dtype: torch.dtype, seed: int = 0, scattered: bool = True) -> HostCase:
    """3 slots, 2 layers, ranks 0 to 64; slot 1 adapts nothing in layer 1."""
    generator = np.random.default_rng(seed)
    ranks = generator.choice([0, 1, 5, 16, 33, 64], size=(3, 2, 7))
    ranks[1, 1] = 0
    ranks[0, 0] = (5, 16, 0, 1, 33, 64, 5)
    return draw_host(WIDTHS, ranks, dtype, seed, scattered)


class Opener(Protocol):
    """A pool, or a pass."""

    def open(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, group: str | None) -> Any: ...


def hand_over(to: Opener, x: torch.Tensor, slot: int, layer: int, group: str | None, slice_tokens: int) -> Any:
    """A handoff of rows of one adapter; None when it is refused."""
    return to.open(x, [Segment(slot, x.shape[0], slice_tokens)], layer, group)


def draw_x(tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poison(pool: WorkerPool) -> None:
    """NaN in all x and y areas."""
    layout = pool.layout
    for slot in range(layout.slots):
        for area in (pool.memory.x, lambda s, t, w: pool.memory.y(s, t, [w])[0]):
            size = layout.x_bytes if area == pool.memory.x else layout.y_bytes
            area(slot, 1, size // layout.torch_dtype.itemsize).fill_(torch.nan)


def is_right(handoff: Handoff, case: HostCase, x: torch.Tensor, slot: int, layer: int, group: str) -> bool:
    for y, want in zip(handoff.outputs, case.expected(x, slot, layer, group), strict=True):
        error = (y.double() - want).abs().max() / max(1.0, float(want.abs().max()))
        if not bool(error <= TOLERANCE[case.host.torch_dtype]):
            return False
        if not bool(want.any()) and bool(y.any()):
            return False
    return True


def counted(pool: WorkerPool, before: Counters) -> Counters:
    """What has come since."""
    now = vars(counters_of(pool))
    return Counters(**{name: now[name] - then for name, then in vars(before).items()})


def eventually(condition: Callable[[], bool]) -> None:
    """Fails only after LONG seconds."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.002)


def state(pid: int) -> str:
    """One letter as in ps; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
