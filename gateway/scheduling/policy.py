"""The seam between placement and its policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from cluster.node_table import NodeTable
from gateway.scheduling.least_loaded import LeastLoaded
from gateway.scheduling.request import PlacementRequest


class Policy(Protocol):
    """Chooses one of the candidates. The gateway and the simulator call the same policies."""

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        """`candidates` i64[C], C >= 1: rows of `nodes` that are able to serve the request, by ascending row. Returns
        one of them; None refuses them all. Only reads; must not do anything whose cost grows with the number of
        adapters."""
        ...


class UnknownPolicy(ValueError):
    """No policy of that name."""


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType({"least_loaded": LeastLoaded})


def make_policy(name: str) -> Policy:
    """Raises UnknownPolicy with the names that exist."""
    if name not in POLICIES:
        raise UnknownPolicy(f"placement policy {name!r} does not exist; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
