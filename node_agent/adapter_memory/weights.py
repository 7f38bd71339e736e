"""Views of an adapter's weights on the device, for computation with torch. GPU kernels read the AdapterTable instead.

A group's A rows may be spread over several pages, and so may a projection's B rows. Each contiguous run of A rows is a
piece, together with the matching part of B. The sum over the pieces is the group's LoRA term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout, PairRows, contiguous_runs, row_units
from node_agent.adapter_memory.pool import Pool
from node_agent.types import GROUPS

Part = tuple[int, int, int, torch.Tensor, float]


@dataclass(frozen=True)
class GroupWeights:
    """Views of one piece of a projection group's LoRA weights: a contiguous run of A rows, and the parts of B that
    belong to these rows."""

    a: torch.Tensor
    """[d_in, number of A rows in the piece]"""
    parts: tuple[Part, ...]
    """Parts of B, one for each projection in the piece: (index of the projection in the group, first and end of its
    columns in xA, b [end - first, d_out], scale)."""


LayerWeights = Mapping[str, tuple[GroupWeights, ...]]
"""Pieces of each adapted group of a layer."""
AdapterWeights = Sequence[LayerWeights]


class ArrivingWeights(Sequence[LayerWeights]):
    """Layers of an adapter that is still loading. Each is looked up when it is accessed."""

    def __init__(self, layers: int, layer_weights: Callable[[int], LayerWeights]) -> None:
        self._layers, self._layer_weights = layers, layer_weights

    def __len__(self) -> int:
        return self._layers

    def __getitem__(self, layer: Any) -> Any:
        return self._layer_weights(layer)


def view_weights(pool: Pool, positions: np.ndarray, layout: AdapterLayout, base: BaseModel) -> AdapterWeights:
    """Returns views of an adapter's weights. `positions` i64[rows]: offsets of its rows from the pool's start, in
    ROW_ALIGN units."""
    return [LayerViews(pool, positions, pairs, base) for pairs in layout.layers]


class LayerViews(LayerWeights):
    """Views of one layer, created on first access. They must not be read before the layer is in the pool."""

    def __init__(self, pool: Pool, positions: np.ndarray, pairs: Sequence[PairRows], base: BaseModel) -> None:
        self._pool, self._positions, self._base = pool, positions, base
        chosen = {group: [pair for pair in pairs if pair.projection in members] for group, members in GROUPS.items()}
        self._pairs = {group: pairs for group, pairs in chosen.items() if pairs}
        self._views: dict[str, tuple[GroupWeights, ...]] = {}

    def make(self) -> None:
        """Creates all views of the layer now."""
        for group in self._pairs:
            self[group]

    def __getitem__(self, group: str) -> tuple[GroupWeights, ...]:
        pieces = self._views.get(group)
        if pieces is None:
            pairs = self._pairs[group]
            pieces = self._views[group] = _pieces(self._pool, self._positions, pairs, GROUPS[group], self._base)
        return pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def _pieces(
    pool: Pool, positions: np.ndarray, pairs: list[PairRows], members: tuple[int, ...], base: BaseModel
) -> tuple[GroupWeights, ...]:
    d_in = base.widths[members[0]][0]
    itemsize = pool.data.element_size()
    a_rows = positions[pairs[0].a : pairs[0].a + sum(pair.rank for pair in pairs)]
    pieces: list[GroupWeights] = []
    for low, end in contiguous_runs(a_rows, row_units(d_in, itemsize)):
        parts: list[Part] = []
        for pair in pairs:
            begin = pair.a - pairs[0].a  # index of the pair's first row among the group's A rows
            first, last = max(low, begin), min(end, begin + pair.rank)
            if first >= last:
                continue
            d_out = base.widths[pair.projection][1]
            b_rows = positions[pair.b + first - begin : pair.b + last - begin]
            for b_low, b_end in contiguous_runs(b_rows, row_units(d_out, itemsize)):
                b = pool.matrix(int(b_rows[b_low]), b_end - b_low, d_out)
                at = first - low
                parts.append((members.index(pair.projection), at + b_low, at + b_end, b, pair.scale))
        a = pool.matrix(int(a_rows[low]), end - low, d_in)
        pieces.append(GroupWeights(a.t(), tuple(parts)))
    return tuple(pieces)
