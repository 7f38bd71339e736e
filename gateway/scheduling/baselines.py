"""Baseline policies that use no performance model of the nodes, for comparison and as a fallback."""

from __future__ import annotations

import random

import numpy as np

from cluster.node_table import ABSENT, STANDARD, NodeTable
from gateway.scheduling.request import RoutingRequest

ASSUMED_ROWS = 32
"""Batch size, in rows, that is assumed for a node that reports no maximum. It is Punica's largest batch."""


class MostIdle:
    """Policy that chooses the node with the fewest requests, whether running, waiting or reserved.

    Ties go to the node with the adapter in the fastest tier, then to the one with the most free KV memory.
    """

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:
        tiers = nodes.tiers(request.digest) if request.digest else {}
        tier = np.array([tiers.get(row, ABSENT) for row in candidates.tolist()])
        order = np.lexsort((-nodes.kv_room[candidates, STANDARD], tier, nodes.requests[candidates]))
        return int(candidates[order[0]])


class FirstFit:
    """Punica's bin packing: the policy chooses the fullest node that has a free row and enough KV memory.

    The other nodes stay empty. Ties go to the first node by id. If no node has room, the one with the fewest requests
    is chosen.
    """

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:
        requests, rows = nodes.requests[candidates], nodes.capacity[candidates]
        fits = requests < np.where(rows < np.inf, rows, ASSUMED_ROWS)
        fits &= nodes.kv_room[candidates, STANDARD] >= request.demand.prompt_tokens + request.demand.max_tokens
        preference = np.where(fits, requests, -1) if fits.any() else -requests
        equal: list[int] = candidates[preference == preference.max()].tolist()
        return min(equal, key=lambda row: nodes.ids[row] or "")


class Random:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:  # noqa: ARG002
        return int(candidates[self._random.randrange(candidates.size)])
