"""Layout of an adapter in pages. Rows are in layer-major order, each aligned to ROW_ALIGN bytes; no row crosses a page
border.

Within a layer, the A rows of a projection group (q, k, v; o; gate, up; down) come first, then its B rows. One matrix
product therefore serves all A rows of a group that share a page. A row is a row of lora_A.weight [d_in] or a column of
lora_B.weight [d_out].

The layout numbers the adapter's pages 0, 1, .... They are mapped to pages of a pool when the adapter is placed. That
mapping differs between the tiers, but the bytes within each page are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from adapters.artifact import FORMAT_VERSION, ArtifactHeader, LayerBlock, StoredPair
from adapters.base_model import PROJECTIONS, BaseModel
from node_agent.types import GROUPS

ROW_ALIGN = 64
"""Alignment of rows, in bytes. Offsets in the AdapterTable count in units of this size."""


@dataclass(frozen=True)
class PairRows:
    """Rows of one adapted projection of one layer."""

    projection: int
    rank: int
    scale: float
    a: int
    """Index of the projection's first A row among the adapter's rows; `b` is the index of its first B row."""
    b: int
    a_source: int
    """Byte offset of A in the artifact's layer block; `b_source` is the offset of B."""
    b_source: int


@dataclass(frozen=True)
class Span:
    """Range of one of the adapter's pages, in ROW_ALIGN units from the start of the page."""

    page: int
    begin: int
    end: int


@dataclass(frozen=True)
class AdapterLayout:
    """Positions of an adapter's rows in its pages, and its part of the AdapterTable."""

    layers: tuple[tuple[PairRows, ...], ...]
    spans: tuple[tuple[Span, ...], ...]
    """Spans that the copy of a layer transfers, for each layer."""
    place: np.ndarray
    """i64[rows]: offset of each row in ROW_ALIGN units, counted from the start of the adapter's page 0 through its
    pages"""
    rank: np.ndarray
    """i32[layers, 7]: rank of each projection. With `scale` f32[layers, 7] and `first` i32[layers, 7, 2], it is the
    adapter's part of the AdapterTable. `first` counts from the adapter's first row."""
    scale: np.ndarray
    first: np.ndarray
    page_units: int
    pages: int
    live: int
    """Bytes of weights, without padding."""

    def adapts(self, layer: int, group: str) -> bool:
        """Returns whether the adapter has weights for any projection of the group in that layer."""
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
        """Bytes that the copy of a layer transfers, for each layer. They include padding between rows and at the ends
        of pages."""
        return tuple(sum(span.end - span.begin for span in spans) * ROW_ALIGN for spans in self.spans)

    @property
    def size(self) -> int:
        """Total bytes of the adapter's pages."""
        return self.pages * self.page_units * ROW_ALIGN

    def positions(self, pages: Sequence[int]) -> np.ndarray:
        """Returns i64[rows]: offset of each row from the start of a pool, in ROW_ALIGN units. `pages`: the pool's pages
        that the adapter has."""
        starts = np.asarray(pages, dtype=np.int64) * self.page_units
        positions: np.ndarray = starts[self.place // self.page_units] + self.place % self.page_units
        return positions


def row_units(width: int, itemsize: int) -> int:
    """Returns the number of ROW_ALIGN units that one row of `width` elements takes."""
    return -(-width * itemsize // ROW_ALIGN)


def contiguous_runs(positions: np.ndarray, units: int) -> list[tuple[int, int]]:
    """Returns the maximal runs of rows that lie `units` apart, each as (first row, end row)."""
    count = len(positions)
    breaks = (positions[1:] - positions[:-1] != units).nonzero()[0]  # np.diff takes longer than the whole function
    if not len(breaks):
        return [(0, count)] if count else []
    return list(pairwise([0, *(breaks + 1).tolist(), count]))


class _Cursor:
    """Allocator of consecutive rows. A row that does not fit in the rest of a page goes to the next one."""

    def __init__(self, page_units: int) -> None:
        self.page_units, self.at, self.rows = page_units, 0, 0
        self.placed: list[np.ndarray] = []

    def put(self, count: int, units: int) -> int:
        """Places `count` rows of `units` ROW_ALIGN units each. Returns the index of the first row."""
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
    """Returns the layout of an artifact's weights with `itemsize` bytes per element. Raises ValueError when the header
    does not match the base model."""
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
    """Returns the layout of an adapter with the same rank and the same projections in every layer."""
    pairs = tuple(StoredPair(projection, rank, 1.0, 0, 0) for projection in projections)
    layers = (LayerBlock(0, 0, "", pairs),) * base.num_layers
    return lay_out(ArtifactHeader(FORMAT_VERSION, "", base.fingerprint, "float32", layers), base, itemsize, page_units)


def _spans(begin: int, end: int, page_units: int) -> tuple[Span, ...]:
    pages = range(begin // page_units, -(-end // page_units))
    starts = [(page, page * page_units) for page in pages]
    return tuple(Span(p, max(begin - at, 0), min(end - at, page_units)) for p, at in starts if end > begin)


def joined_spans(spans: Sequence[Span]) -> list[Span]:
    """Returns the spans, with adjacent spans of the same page merged."""
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
