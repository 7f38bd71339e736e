"""LoRA of a pass: the adapters of its segments, and the arithmetic that is called at each projection group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import torch

from adapters.base_model import BaseModel
from kernels.build import unless_uncompiled
from kernels.compiled import DTYPES, CompiledGroup, Segments, load_operators
from kernels.grouped import add_pieces
from kernels.view import GroupView, group_view
from node_agent.adapter_memory.table import AdapterTable
from node_agent.adapter_memory.weights import AdapterWeights
from node_agent.leases import Lease
from node_agent.types import GROUPS, LoraBatch, PassLora

log = logging.getLogger(__name__)

Weights = Callable[[Lease], AdapterWeights]
Add = Callable[[int, str, Sequence[torch.Tensor], torch.Tensor], None]
"""Function of (layer, group, ys, x) that adds the LoRA terms of x [T, d_in] to each ys[p] [T, d_out] in place."""

LONG_SEGMENT = {torch.bfloat16: 32, torch.float32: 12, torch.float16: 1 << 20}
"""Number of tokens of a segment from which torch's products are faster than the compiled operator, by dtype.

Measured by benchmarks/kernels at rank 64; at rank 8 the operator stays faster up to twice this length. fp16 never uses
torch, because few processors multiply it.
"""


def table_views(table: AdapterTable, pool: torch.Tensor, base: BaseModel) -> list[dict[str, GroupView]]:
    """Returns the table's views for the operations, by layer and projection group."""
    tensors = (pool, table.rank, table.scale, table.first, table.row_offset)
    return [
        {group: group_view(*tensors, layer, members) for group, members in GROUPS.items()}
        for layer in range(base.num_layers)
    ]


class AdaptedGroups:
    """Projection groups that the adapters of a pass adapt, by layer. `weights` is called once per segment, at the first
    computed layer: a cold pass is created before its adapter has arrived."""

    def __init__(self, weights: Weights, batch: LoraBatch) -> None:
        self._weights, self._leases = weights, batch.leases
        self._groups: dict[int, set[str]] = {}
        """groups that any segment's adapter adapts, by layer"""

    @cached_property
    def by_segment(self) -> list[AdapterWeights | None]:
        """Weights of each segment; None for the base."""
        return [None if lease is None else self._weights(lease) for lease in self._leases]

    def has(self, layer: int, group: str) -> bool:
        groups = self._groups.get(layer)
        if groups is None:
            adapters = (weights for weights in self.by_segment if weights is not None)
            groups = self._groups[layer] = set().union(*(weights[layer] for weights in adapters))
        return group in groups


class GroupLora:
    """PassLora that keeps a group's input until its base product is computed, and then calls `add`."""

    def __init__(self, add: Add | None, adapted: AdaptedGroups | None = None) -> None:
        """`adapted`: groups in which LoRA terms are added. None: all groups, as a captured pass must."""
        self._add, self._adapted = add, adapted
        self._x: torch.Tensor | None = None

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        if self._adapted is not None and not self._adapted.has(layer, group):
            return False
        self._x = x
        return True

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        assert self._x is not None and self._add is not None
        self._add(layer, group, ys, self._x)
        self._x = None


class NoHandoffs:
    """ArrivingLora that adds nothing, for the measurement and check of passes with handoffs.

    The pass is computed as if CPU workers added LoRA in `groups`, without handoffs.
    """

    on_device: PassLora | None = None
    hands_over = True

    def __init__(self, groups: Collection[str]) -> None:
        self._groups = groups

    def adapts(self, layer: int, group: str) -> bool:  # noqa: ARG002 - an ArrivingLora's signature
        return group in self._groups

    def claim(self, layer: int) -> bool:  # noqa: ARG002
        return False

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:  # noqa: ARG002
        return False

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        raise AssertionError(f"layer {layer}: {group} was not begun")


class CompiledLora:
    """Compiled operators for all projection groups of a table. Raises CompileError."""

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
        """Returns the segments of a pass for the operator. Segments with an index in `without` count as the base
        model's."""
        slots = batch.seg_slot
        if without:
            slots = slots.clone()
            slots[without] = -1
        tokens = batch.token_slot.shape[0]
        return Segments(batch.seg_start, slots, tokens, batch.max_rank, self.widest, torch.get_num_threads())


def compiled_lora(table: AdapterTable, pool: torch.Tensor, base: BaseModel) -> CompiledLora | None:
    """Returns the compiled operators; None if they can't be used. A compiler's failure is logged."""
    if pool.device.type != "cpu" or pool.dtype not in DTYPES:
        return None
    warning = "LoRA runs without the compiled operator, more slowly"
    return unless_uncompiled(lambda: CompiledLora(table, pool, base), log, warning)


class SegmentedLora(GroupLora):
    """PassLora for adapters that are completely on the device when the pass's first layer runs. The compiled operator,
    if there is one, computes all short segments of a group in one call; torch computes the long ones."""

    def __init__(self, batch: LoraBatch, weights: Weights, compiled: CompiledLora | None = None) -> None:
        self._adapters = AdaptedGroups(weights, batch)
        super().__init__(None, self._adapters)
        self._batch, self._compiled = batch, compiled
        self._long: list[tuple[int, int, AdapterWeights]] | None = None
        """(first token, end token, weights) of each segment computed by torch; None before the first group of the
        pass"""
        self._segments: Segments | None = None
        """segments that the operator computes"""

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        assert self._x is not None
        if self._long is None:
            self._long = self._split_segments()
        if self._compiled is not None and self._segments is not None:
            self._compiled.groups[layer][group].add(ys, self._x, self._segments)
        for start, end, weights in self._long:
            pieces = [(piece.a, piece.parts) for piece in weights[layer].get(group, ())]
            add_pieces(ys, self._x, start, end, pieces)
        self._x = None

    def _split_segments(self) -> list[tuple[int, int, AdapterWeights]]:
        """Divides the pass's segments between the compiled operator and torch. Returns (first token, end token,
        weights) of those for torch."""
        by_segment, shortest = (
            self._adapters.by_segment,
            self._compiled.long_segment if self._compiled is not None else 0,
        )
        long = {
            index: (start, end, weights)
            for index, ((start, end), weights) in enumerate(zip(self._batch.bounds, by_segment, strict=True))
            if weights is not None and end - start >= shortest
        }
        if self._compiled is not None and len(long) < len(by_segment) - by_segment.count(None):
            self._segments = self._compiled.segments(self._batch, list(long))
        return list(long.values())
