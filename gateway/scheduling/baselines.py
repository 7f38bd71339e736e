"""Policies without a model of the nodes' work, to compare with and to fall back on."""

from __future__ import annotations

import random

import numpy as np

from cluster.node_table import ABSENT, STANDARD, NodeTable
from gateway.scheduling.request import PlacementRequest

ASSUMED_ROWS = 32
"""Punica's largest batch, of a node that does not report its own."""


class MostIdle:
    """The node with the fewest requests; of equals the one nearest to having the adapter, then the one with more KV
    memory."""

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        tiers = nodes.tiers(request.digest) if request.digest else {}
        tier = np.array([tiers.get(row, ABSENT) for row in candidates.tolist()])
        order = np.lexsort((-nodes.kv_room[candidates, STANDARD], tier, nodes.requests[candidates]))
        return int(candidates[order[0]])


class FirstFit:
    """Punica's bin packing: the fullest node that has a row and KV memory free, so that others stay empty; of equals
    the first by id. When none has, the one with the fewest requests."""

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        requests, rows = nodes.requests[candidates], nodes.capacity[candidates]
        fits = requests < np.where(rows < np.inf, rows, ASSUMED_ROWS)
        fits &= nodes.kv_room[candidates, STANDARD] >= request.demand.prompt_tokens + request.demand.max_tokens
        preference = np.where(fits, requests, -1) if fits.any() else -requests
        equal: list[int] = candidates[preference == preference.max()].tolist()
        return min(equal, key=lambda row: nodes.ids[row] or "")


class Random:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:  # noqa: ARG002
        return int(candidates[self._random.randrange(candidates.size)])
