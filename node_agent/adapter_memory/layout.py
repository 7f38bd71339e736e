"""How an adapter lies in memory: rows in layer-major order, each at a multiple of ROW_ALIGN bytes.

Within a layer, the A rows of a projection group (q, k, v; o; gate, up; down) follow each other and then its B rows do,
so that one product serves the whole group's A. A row is a row of lora_A.weight [d_in] or a column of lora_B.weight
[d_out].
"""

from __future__ import annotations

from dataclasses import dataclass

from adapters.artifact import ArtifactHeader
from adapters.base_model import BaseModel
from node_agent.types import GROUPS

ROW_ALIGN = 64
"""Bytes; offsets in the AdapterTable count in this unit."""


@dataclass(frozen=True)
class PairRows:
    """One adapted projection of one layer. Offsets in ROW_ALIGN units from the adapter's start."""

    projection: int
    rank: int
    scale: float
    a: int
    b: int
    a_source: int
    """Byte offsets in the artifact's layer block."""
    b_source: int


@dataclass(frozen=True)
class AdapterLayout:
    layers: tuple[tuple[PairRows, ...], ...]
    layer_start: tuple[int, ...]
    """ROW_ALIGN units; one entry more than there are layers"""
    rows: int
    max_rank: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.layer_start[-1] * ROW_ALIGN


def row_units(width: int, itemsize: int) -> int:
    """ROW_ALIGN units of one row of `width` elements."""
    return -(-width * itemsize // ROW_ALIGN)


def lay_out(header: ArtifactHeader, base: BaseModel, itemsize: int) -> AdapterLayout:
    """Where every row goes for weights of `itemsize` bytes. Raises ValueError when the header is not of this base."""
    if len(header.layers) != base.num_layers:
        raise ValueError(f"artifact has {len(header.layers)} layers, the base has {base.num_layers}")
    layers: list[tuple[PairRows, ...]] = []
    starts = [0]
    at = rows = max_rank = 0
    for block in header.layers:
        by_projection = {pair.projection: pair for pair in block.pairs}
        placed: list[PairRows] = []
        for members in GROUPS.values():
            pairs = [by_projection[p] for p in members if p in by_projection]
            a_at: list[int] = []
            for pair in pairs:
                a_at.append(at)
                at += pair.rank * row_units(base.widths[pair.projection][0], itemsize)
            for pair, a in zip(pairs, a_at, strict=True):
                placed.append(PairRows(pair.projection, pair.rank, pair.scale, a, at, pair.a_offset, pair.b_offset))
                at += pair.rank * row_units(base.widths[pair.projection][1], itemsize)
                rows += 2 * pair.rank
                max_rank = max(max_rank, pair.rank)
        layers.append(tuple(placed))
        starts.append(at)
    return AdapterLayout(tuple(layers), tuple(starts), rows, max_rank)
