"""How much there is to compute in each projection group of a layer."""

from __future__ import annotations

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.types import GROUPS


def group_elements(layout: AdapterLayout, layer: int, base: BaseModel) -> dict[str, int]:
    """Weights of each adapted projection group of a layer."""
    ranks = {pair.projection: pair.rank for pair in layout.layers[layer]}
    found = {group: sum(ranks.get(p, 0) * sum(base.widths[p]) for p in members) for group, members in GROUPS.items()}
    return {group: elements for group, elements in found.items() if elements}


def group_shares(base: BaseModel) -> dict[str, float]:
    """Each group's part of a layer's time, by its products."""
    sizes = {group: sum(base.widths[p][0] * base.widths[p][1] for p in members) for group, members in GROUPS.items()}
    return {group: size / sum(sizes.values()) for group, size in sizes.items()}


def group_widths(base: BaseModel, group: str) -> tuple[int, int]:
    """Elements of a token's input and of its outputs together."""
    members = GROUPS[group]
    return base.widths[members[0]][0], sum(base.widths[p][1] for p in members)
