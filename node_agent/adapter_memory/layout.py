"""Layout of an adapter in pages: rows in layer-major order, each at a multiple of ROW_ALIGN bytes, none across a page
border.

Within a layer, the A rows of a projection group (q, k, v; o; gate, up; down) follow each other and then its B rows do,
so that one product serves the whole group's A wherever they share a page. A row is a row of lora_A.weight [d_in] or a
column of lora_B.weight [d_out]. The layout counts the adapter's own pages 0, 1, ...; which pages of a pool these are is
decided when it gets room, and differs between the tiers, but within each page both tiers hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from adapters.artifact import FORMAT_VERSION, ArtifactHeader, LayerBlock, Pair
from adapters.base_model import PROJECTIONS, BaseModel
from node_agent.types import GROUPS

ROW_ALIGN = 64
"""Bytes; offsets in the AdapterTable count in this unit."""


@dataclass(frozen=True)
class PairRows:
    """Adapted projection of one layer."""

    projection: int
    rank: int
    scale: float
    a: int
    """Index of its first A row among the adapter's rows; `b` is that of its first B row."""
    b: int
    a_source: int
    """Byte offsets in the artifact's layer block."""
    b_source: int


@dataclass(frozen=True)
class Span:
    """A stretch of one of the adapter's pages, in ROW_ALIGN units from the page's start."""

    page: int
    begin: int
    end: int


@dataclass(frozen=True)
class AdapterLayout:
    layers: tuple[tuple[PairRows, ...], ...]
    spans: tuple[tuple[Span, ...], ...]
    """Per layer: what a copy of that layer moves."""
    place: np.ndarray
    """i64[rows]: each row's unit, counted through the adapter's own pages"""
    rank: np.ndarray
    """i32[layers, 7]; with scale f32[same] and first i32[layers, 7, 2], the adapter's part of the AdapterTable, `first`
    counted from its own first row"""
    scale: np.ndarray
    first: np.ndarray
    page_units: int
    pages: int
    live: int
    """Bytes of weights, without padding."""

    def adapts(self, layer: int, group: str) -> bool:
        """Returns whether any projection of the group is adapted in that layer."""
        return any(pair.projection in GROUPS[group] for pair in self.layers[layer])

    @property
    def rows(self) -> int:
        return len(self.place)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The adapter's distinct ranks, ascending."""
        return tuple(np.unique(self.rank[self.rank > 0]).tolist())

    @cached_property
    def moved(self) -> tuple[int, ...]:
        """The bytes, per layer, that a copy of the layer moves, those between rows and at pages' ends included."""
        return tuple(sum(span.end - span.begin for span in spans) * ROW_ALIGN for spans in self.spans)

    @property
    def size(self) -> int:
        """The bytes of the pages that the adapter takes."""
        return self.pages * self.page_units * ROW_ALIGN

    def positions(self, pages: Sequence[int]) -> np.ndarray:
        """Returns i64[rows]: each row's unit from the start of a pool in which the adapter has these pages."""
        starts = np.asarray(pages, dtype=np.int64) * self.page_units
        positions: np.ndarray = starts[self.place // self.page_units] + self.place % self.page_units
        return positions


def row_units(width: int, itemsize: int) -> int:
    """Returns the ROW_ALIGN units of one row of `width` elements."""
    return -(-width * itemsize // ROW_ALIGN)


def contiguous_runs(positions: np.ndarray, units: int) -> list[tuple[int, int]]:
    """Returns (low, end) of each maximal run of rows that lie `units` apart."""
    count = len(positions)
    breaks = (positions[1:] - positions[:-1] != units).nonzero()[0]  # np.diff takes longer than all of this
    if not len(breaks):
        return [(0, count)] if count else []
    return list(pairwise([0, *(breaks + 1).tolist(), count]))


class _Cursor:
    """Places rows one after another; a row that no longer fits in the page begins the next one."""

    def __init__(self, page_units: int) -> None:
        self.page_units, self.at, self.rows = page_units, 0, 0
        self.placed: list[np.ndarray] = []

    def put(self, count: int, units: int) -> int:
        """Places `count` rows of `units` each. Returns the index of the first."""
        first = self.rows
        while count:
            remaining = self.page_units - self.at % self.page_units
            n = min(count, remaining // units)
            if not n:
                self.at += remaining
                continue
            self.placed.append(self.at + np.arange(n, dtype=np.int64) * units)
            self.at += n * units
            self.rows += n
            count -= n
        return first


def lay_out(header: ArtifactHeader, base: BaseModel, itemsize: int, page_units: int) -> AdapterLayout:
    """Returns where every row goes for weights of `itemsize` bytes. Raises ValueError when the header is not of this
    base."""
    if len(header.layers) != base.num_layers:
        raise ValueError(f"artifact has {len(header.layers)} layers, the base has {base.num_layers}")
    cursor, live = _Cursor(page_units), 0
    units = [[row_units(width, itemsize) for width in pair] for pair in base.widths]
    layers: list[tuple[PairRows, ...]] = []
    spans: list[tuple[Span, ...]] = []
    for block in header.layers:
        by_projection = {pair.projection: pair for pair in block.pairs}
        placed: list[PairRows] = []
        begin = cursor.at
        for members in GROUPS.values():
            pairs = [by_projection[p] for p in members if p in by_projection]
            a_rows = [cursor.put(pair.rank, units[pair.projection][0]) for pair in pairs]
            for pair, a in zip(pairs, a_rows, strict=True):
                b = cursor.put(pair.rank, units[pair.projection][1])
                placed.append(PairRows(pair.projection, pair.rank, pair.scale, a, b, pair.a_offset, pair.b_offset))
                live += pair.rank * sum(base.widths[pair.projection]) * itemsize
        layers.append(tuple(placed))
        spans.append(_spans(begin, cursor.at, page_units))
    place = np.concatenate(cursor.placed) if cursor.placed else np.zeros(0, dtype=np.int64)
    rank, scale, first = _table_part(layers)
    pages = -(-cursor.at // page_units)
    return AdapterLayout(tuple(layers), tuple(spans), place, rank, scale, first, page_units, pages, live)


def lay_out_uniform(
    base: BaseModel, rank: int, projections: Sequence[int], itemsize: int, page_units: int
) -> AdapterLayout:
    """Returns the layout of an adapter that has the same rank on these projections of every layer."""
    pairs = tuple(Pair(projection, rank, 1.0, 0, 0) for projection in projections)
    layers = (LayerBlock(0, 0, "", pairs),) * base.num_layers
    return lay_out(ArtifactHeader(FORMAT_VERSION, "", base.fingerprint, "float32", layers), base, itemsize, page_units)


def _spans(begin: int, end: int, page_units: int) -> tuple[Span, ...]:
    pages = range(begin // page_units, -(-end // page_units))
    starts = [(page, page * page_units) for page in pages]
    return tuple(Span(p, max(begin - at, 0), min(end - at, page_units)) for p, at in starts if end > begin)


def joined_spans(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans with those that follow each other in a page joined to one."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.page, last.end) == (span.page, span.begin):
            joined[-1] = Span(span.page, last.begin, span.end)
        else:
            joined.append(span)
    return joined


def _table_part(layers: Sequence[Sequence[PairRows]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = (len(layers), len(PROJECTIONS))
    rank, scale = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32)
    first = np.zeros((*shape, 2), dtype=np.int32)
    for layer, pairs in enumerate(layers):
        for pair in pairs:
            where = (layer, pair.projection)
            rank[where], scale[where], first[where] = pair.rank, pair.scale, (pair.a, pair.b)
    return rank, scale, first
