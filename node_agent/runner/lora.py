"""A pass's LoRA: which segments use which adapter, and the call into the arithmetic at every projection group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from adapters.base_model import BaseModel
from kernels.build import CompileError
from kernels.compiled import DTYPES, CompiledGroup, Segments, load_operators
from kernels.grouped import add_pieces
from kernels.view import GroupView, group_view
from node_agent.adapter_memory.table import AdapterTable
from node_agent.adapter_memory.weights import AdapterWeights
from node_agent.types import GROUPS, Lease, LoraBatch

log = logging.getLogger(__name__)

Weights = Callable[[Lease], AdapterWeights]

LONG_SEGMENT = {torch.bfloat16: 32, torch.float32: 12}
"""Tokens from which on torch's matrix products are faster than the compiled operator (benchmarks/kernels.py's segments:
for ranks of 64; at rank 8 the operator stays ahead for twice as long)."""


def table_views(table: AdapterTable, pool: torch.Tensor, base: BaseModel) -> list[dict[str, GroupView]]:
    """Returns the views of the table that the operations read, per layer and projection group."""
    tensors = (pool, table.rank, table.scale, table.first, table.row_offset)
    return [
        {group: group_view(*tensors, layer, members) for group, members in GROUPS.items()}
        for layer in range(base.num_layers)
    ]


class AdaptedGroups:
    """Which projection groups the adapters of a pass adapt; the others' kernels need not be launched."""

    def __init__(self, weights: Weights, batch: LoraBatch) -> None:
        self._weights, self._leases = weights, batch.leases
        self._found: list[AdapterWeights] | None = None

    def has(self, layer: int, group: str) -> bool:
        if self._found is None:  # a cold pass is made before its adapter has arrived
            self._found = [self._weights(lease) for lease in self._leases if lease is not None]
        return any(group in weights[layer] for weights in self._found)


class CompiledLora:
    """The compiled operator for every projection group of a table. Raises CompileError."""

    def __init__(self, table: AdapterTable, pool: torch.Tensor, base: BaseModel) -> None:
        operators = load_operators()
        self.long_segment = LONG_SEGMENT[pool.dtype]
        self.widest = max(d_in for d_in, _ in base.widths)
        widths = {
            group: (base.widths[members[0]][0], [base.widths[p][1] for p in members])
            for group, members in GROUPS.items()
        }
        self.groups = [
            {group: CompiledGroup(operators, view, *widths[group]) for group, view in layer.items()}
            for layer in table_views(table, pool, base)
        ]

    def segments(self, batch: LoraBatch, without: Sequence[int] = ()) -> Segments:
        """Those of a pass, but for the segments of these indices."""
        slots = batch.seg_slot
        if without:
            slots = slots.clone()
            slots[without] = -1
        tokens = batch.token_slot.shape[0]
        return Segments(batch.seg_start, slots, tokens, batch.max_rank, self.widest, torch.get_num_threads())


def compiled_lora(table: AdapterTable, pool: torch.Tensor, base: BaseModel) -> CompiledLora | None:
    """None where the operator can't be used; why is logged."""
    if pool.device.type != "cpu" or pool.dtype not in DTYPES:
        return None
    try:
        return CompiledLora(table, pool, base)
    except CompileError as error:
        log.warning("LoRA runs without the compiled operator, more slowly", extra={"reason": str(error)})
        return None


class SegmentedLora:
    """A PassLora for adapters that are wholly on the device when their first layer runs.

    `weights` is asked once per segment, at the first layer that it computes, and then by layer.
    Where the compiled operator is, it computes all short segments of a group in one call.
    """

    def __init__(
        self, batch: LoraBatch, weights: Callable[[Lease], AdapterWeights], compiled: CompiledLora | None = None
    ) -> None:
        self._batch = batch
        self._weights = weights
        self._compiled = compiled
        self._begun = False
        self._long: list[tuple[int, int, AdapterWeights]] = []
        self._short: list[AdapterWeights] = []
        self._groups: dict[int, set[str]] = {}
        """by layer, the groups that some segment's adapter adapts; asked layer by layer, as they arrive"""
        self._segments: Segments | None = None
        self._x: torch.Tensor | None = None

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        if not self._begun:
            self._choose_ways()
            self._begun = True
        groups = self._groups.get(layer)
        if groups is None:
            adapters = (*self._short, *(weights for _, _, weights in self._long))
            groups = self._groups[layer] = set().union(*(weights[layer] for weights in adapters))
        if group in groups:
            self._x = x
            return True
        return False

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        assert self._x is not None
        if self._compiled is not None and self._segments is not None:
            self._compiled.groups[layer][group].add(ys, self._x, self._segments)
        for start, end, weights in self._long:
            pieces = [(piece.a, piece.parts) for piece in weights[layer].get(group, ())]
            add_pieces(ys, self._x, start, end, pieces)
        self._x = None

    def _choose_ways(self) -> None:
        by_torch: list[int] = []
        for index, ((start, end), lease) in enumerate(zip(self._batch.bounds, self._batch.leases, strict=True)):
            if lease is None:
                continue
            weights = self._weights(lease)
            if self._compiled is None or end - start >= self._compiled.long_segment:
                self._long.append((start, end, weights))
                by_torch.append(index)
            else:
                self._short.append(weights)
        if self._compiled is not None and self._short:
            self._segments = self._compiled.segments(self._batch, by_torch)
