"""An adapter's weights on the device as ready-made views, so that a step makes none."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.pool import Pool
from node_agent.types import GROUPS


@dataclass(frozen=True)
class GroupWeights:
    a: torch.Tensor
    """[d_in, sum of the group's ranks]"""
    parts: tuple[tuple[int, int, int, torch.Tensor, float], ...]
    """Per projection of the group: index of its output, its columns in xA (low, high), b [rank, d_out], scale."""


AdapterWeights = list[dict[str, GroupWeights]]
"""Per layer, per group that is adapted."""


def view_weights(pool: Pool, start: int, layout: AdapterLayout, base: BaseModel) -> AdapterWeights:
    layers: AdapterWeights = []
    for pairs in layout.layers:
        groups: dict[str, GroupWeights] = {}
        for group, members in GROUPS.items():
            chosen = [pair for pair in pairs if pair.projection in members]
            if not chosen:
                continue
            total = sum(pair.rank for pair in chosen)
            # the A rows of a group follow each other (layout.py): one matrix
            a = pool.matrix(start + chosen[0].a, total, base.widths[members[0]][0])
            parts: list[tuple[int, int, int, torch.Tensor, float]] = []
            at = 0
            for pair in chosen:
                b = pool.matrix(start + pair.b, pair.rank, base.widths[pair.projection][1])
                parts.append((members.index(pair.projection), at, at + pair.rank, b, pair.scale))
                at += pair.rank
            groups[group] = GroupWeights(a.t(), tuple(parts))
        layers.append(groups)
    return layers
