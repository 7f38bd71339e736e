"""How many calls of batches may begin now, so that calls which somebody waits for find rows free."""

from __future__ import annotations

import numpy as np

from cluster.node_table import STANDARD, NodeTable

KEPT_SHARE = 1 / 8
"""Of a node's rows, rounded down: batches leave them free."""


def spare_rows(nodes: NodeTable, base: str, in_flight: int) -> float:
    """Returns how many more calls find a row that nobody waits for; infinite where a node does not report its rows.

    `in_flight`: calls of batches under way. While no node serves, one call asks for a node where an autoscaler is.
    """
    rows = nodes.serving(base).rows
    if not rows.size:
        return max(0, 1 - in_flight)
    capacity, free = nodes.capacity[rows], nodes.rows_free[rows, STANDARD]
    kept = np.floor(np.where(np.isfinite(capacity), capacity, 0.0) * KEPT_SHARE)
    usable = ~nodes.full[rows] & (nodes.kv_room[rows, STANDARD] > 0)
    spare = np.where(usable, np.maximum(free - kept, 0.0), 0.0)
    return float(np.sum(spare))
