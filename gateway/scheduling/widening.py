"""Nodes whose performance model has been off for a while: what it forecasts refuses nobody until it is right again.

Each node reports how long its last passes took over what its model forecasts (`forecast_ratio`). A request that no
node could serve in time is refused at once, by forecasts alone; where these are wrong, it would be for nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np

from cluster.model_check import is_off
from cluster.node_table import NodeTable

PATIENCE = 60.0
"""Seconds that it is off before it is widened."""
EVERY = 1.0
"""Seconds between two looks at the nodes."""

log = logging.getLogger("gateway")


class Widening:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked = -math.inf
        self._since: dict[str, float] = {}
        """Start of the time for which a node's model is off, by node."""
        self._widened: frozenset[str] = frozenset()

    def look(self, nodes: NodeTable) -> None:
        """Records which nodes' models have been off for PATIENCE seconds. To be called before every choice; most calls
        do nothing."""
        now = self._clock()
        if now - self._looked < EVERY:
            return
        self._looked = now
        off = [nodes.record(row).id for row in nodes.rows() if is_off(nodes.record(row).forecast_ratio)]
        self._since = {node: self._since.get(node, now) for node in off}
        found = frozenset(node for node, since in self._since.items() if now - since >= PATIENCE)
        for node in found - self._widened:
            log.warning("forecasts of node %s are off: they refuse nobody until they are right again", node)
        for node in self._widened - found:
            log.info("forecasts of node %s count again", node)
        self._widened = found

    def widened(self, nodes: NodeTable, candidates: np.ndarray) -> np.ndarray:
        """bool[C]"""
        if not self._widened:
            return np.zeros(candidates.size, np.bool_)
        return np.array([nodes.ids[row] in self._widened for row in candidates.tolist()])
