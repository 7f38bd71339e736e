"""The node with the fewest requests; of equals one that has the adapter already, then the one with more KV memory."""

from __future__ import annotations

import numpy as np

from cluster.node_table import NodeTable
from gateway.scheduling.request import PlacementRequest


class LeastLoaded:
    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        load = (nodes.running + nodes.queued + nodes.reserved)[candidates]
        tiers = nodes.tiers(request.digest) if request.digest else {}
        absent = np.array([row not in tiers for row in candidates.tolist()], np.int64)
        return int(candidates[np.lexsort((-nodes.kv_tokens_free[candidates], absent, load))[0]])
