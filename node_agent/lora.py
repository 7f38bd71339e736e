"""A pass's LoRA: which segments use which adapter, and the call into the arithmetic at every projection group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.grouped import add_segment
from node_agent.adapter_memory.weights import AdapterWeights
from node_agent.types import Lease, LoraBatch


class SegmentedLora:
    """A PassLora for adapters that are wholly on the device when their first layer runs.

    `weights` is asked once per segment, at the pass's first layer: a cold pass is made before its adapter has arrived.
    """

    def __init__(self, batch: LoraBatch, weights: Callable[[Lease], AdapterWeights]) -> None:
        self._batch = batch
        self._weights = weights
        self._segments: list[tuple[int, int, AdapterWeights]] | None = None
        self._x: torch.Tensor | None = None

    def begin(self, layer: int, group: str, x: torch.Tensor) -> None:  # noqa: ARG002 - the seam's signature
        self._x = x
        if self._segments is None:
            self._segments = [
                (start, end, self._weights(lease))
                for (start, end), lease in zip(self._batch.bounds, self._batch.leases, strict=True)
                if lease is not None
            ]

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        assert self._x is not None and self._segments is not None
        for start, end, weights in self._segments:
            for piece in weights[layer].get(group, ()):
                add_segment(ys, self._x, start, end, piece.a, piece.parts)
        self._x = None
