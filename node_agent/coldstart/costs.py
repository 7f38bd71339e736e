"""Amount of computation per projection group of a layer, and the cost of a chunk without CPU workers."""

from __future__ import annotations

from math import inf

import numpy as np

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.coldstart.planner import ChunkCosts
from node_agent.coldstart.profile import Profile
from node_agent.types import GROUPS


def group_elements(layout: AdapterLayout, layer: int, base: BaseModel) -> dict[str, int]:
    """Returns the number of LoRA weight elements of each adapted projection group of a layer."""
    ranks = {pair.projection: pair.rank for pair in layout.layers[layer]}
    by_group = {group: sum(ranks.get(p, 0) * sum(base.widths[p]) for p in members) for group, members in GROUPS.items()}
    return {group: elements for group, elements in by_group.items() if elements}


def group_shares(base: BaseModel) -> dict[str, float]:
    """Returns each projection group's share of a layer's time, 0 to 1, in proportion to the size of its matrix
    products."""
    sizes = {group: sum(base.widths[p][0] * base.widths[p][1] for p in members) for group, members in GROUPS.items()}
    return {group: size / sum(sizes.values()) for group, size in sizes.items()}


def pipelined_costs(profile: Profile, layout: AdapterLayout, tokens: int, loads: int = 1) -> ChunkCosts:
    """Returns the costs of a chunk without CPU workers. Its adapter is loaded from host memory over a link shared by
    `loads` loads."""
    layers = len(layout.layers)
    return ChunkCosts(
        device=profile.layer_seconds(tokens),
        cpu=np.full(layers, inf),
        load=loads * np.array(layout.moved, float) / profile.link.bandwidth,
        in_host=np.zeros(layers),
        latency=profile.link.latency,
    )


def result_bytes(layout: AdapterLayout, base: BaseModel, row_bytes: int) -> np.ndarray:
    """Returns f64[N layers]: bytes of the workers' results for each layer, which cross the link to the device.
    `row_bytes`: bytes of one element times the number of rows."""
    elements = np.array([base.widths[p][1] for p in range(len(base.widths))], float)
    adapted = np.zeros((len(layout.layers), len(elements)), bool)
    for layer in range(len(layout.layers)):
        for members in GROUPS.values():  # a group's message contains the results of all its projections
            if any(layout.rank[layer, p] for p in members):
                adapted[layer, list(members)] = True
    sizes: np.ndarray = row_bytes * (adapted @ elements)
    return sizes


def group_widths(base: BaseModel, group: str) -> tuple[int, int]:
    """Returns the number of elements of a token's input to a projection group, and that of all its outputs together."""
    members = GROUPS[group]
    return base.widths[members[0]][0], sum(base.widths[p][1] for p in members)
