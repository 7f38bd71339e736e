"""How much there is to compute in each projection group of a layer, and what a chunk costs without CPU workers."""

from __future__ import annotations

from math import inf

import numpy as np

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.coldstart.planner import ChunkCosts
from node_agent.coldstart.profile import Profile
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


def pipelined_costs(profile: Profile, layout: AdapterLayout, tokens: int, loads: int = 1) -> ChunkCosts:
    """Returns what a chunk costs whose adapter comes from host memory, without CPU workers, over a link that `loads`
    loads share."""
    layers = len(layout.layers)
    return ChunkCosts(
        device=profile.layer_seconds(tokens),
        cpu=np.full(layers, inf),
        load=loads * np.array(layout.moved, float) / profile.link.bandwidth,
        in_host=np.zeros(layers),
        latency=profile.link.latency,
    )


def group_widths(base: BaseModel, group: str) -> tuple[int, int]:
    """Elements of a token's input and of its outputs together."""
    members = GROUPS[group]
    return base.widths[members[0]][0], sum(base.widths[p][1] for p in members)
