"""Baselines of the GPU's cold starts: handoffs that the host waits for, and adapters by plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from node_agent.coldstart.handoffs import Handoff
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.stream import StreamPool
from node_agent.coldstart.workers import WorkerPool
from node_agent.engine.loop import Engine
from node_agent.runner.lora import SegmentedLora


@contextmanager
def plain_torch(engine: Engine) -> Iterator[None]:
    """Meanwhile every segment is computed by torch's own products, and no step by a captured one."""
    start, runner = engine.start_lora, cast(Any, engine.runner)
    captured = getattr(runner, "buckets", None)
    engine.start_lora = lambda batch, _: SegmentedLora(batch, engine.store.weights)
    if captured is not None:
        runner.buckets = []
    try:
        yield
    finally:
        engine.start_lora = start
        if captured is not None:
            runner.buckets = captured


class SyncedPass:
    """PassHandoffs by explicit synchronisation: x is copied to the host, which signals, waits and copies back."""

    failed, quiet = False, True
    """The host waits for each handoff."""

    def __init__(self, pool: StreamPool) -> None:
        self._pool = pool

    def open(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, group: str | None) -> SyncedHandoff | None:
        handoff = WorkerPool.open(self._pool, x.cpu(), segments, layer, group)
        return None if handoff is None else SyncedHandoff(handoff, x.device)

    def end(self) -> None:
        return None


class SyncedHandoff:
    def __init__(self, handoff: Handoff, device: torch.device) -> None:
        self._handoff, self._device = handoff, device

    def wait(self) -> bool:
        return self._handoff.wait()

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        return [part.to(self._device) for part in self._handoff.outputs]

    def close(self) -> None:
        self._handoff.close()


@contextmanager
def synced(pool: StreamPool) -> Iterator[None]:
    """Passes that begin meanwhile are handed over by the host."""
    usual = pool.begin_pass
    pool.begin_pass = lambda: SyncedPass(pool)  # type: ignore[method-assign, assignment, return-value]
    try:
        yield
    finally:
        pool.begin_pass = usual  # type: ignore[method-assign]
