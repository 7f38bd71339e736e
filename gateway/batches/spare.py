"""Spare capacity for calls of batches: interactive calls must find free rows and short decode steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cluster.node_table import STANDARD, NodeTable

KEPT_SHARE = 1 / 8
"""Share of a node's rows that batches leave free for the next interactive calls, rounded down to whole rows."""
LONGER_SHARE = 1 / 4
"""Maximum share by which calls of batches may prolong the decode steps of a node with interactive calls."""
UNKNOWN_SHARE = 1 / 8
"""Maximum share of a node's rows that batches get if the node also has interactive calls, and its decode step is
unknown."""
CALLED_S = 5.0
"""Seconds for which a node is treated as having interactive requests after the last one ended. Another one is likely in
this time."""


class SpareRows:
    """Counter of spare rows: rows of the nodes' batches that calls of batches may use now. `clock`: monotonic
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._called = np.empty(0)
        """Time of each node's last interactive request in monotonic seconds, by row of the node table."""

    def count(self, nodes: NodeTable, base: str, in_flight: int) -> float:
        """Returns the number of further calls that may start; infinite if a node does not report its rows.

        `in_flight`: calls of batches in progress. Without a serving node one call may start, so that an autoscaler
        notices.
        """
        rows = nodes.serving(base).rows
        if not rows.size:
            return max(0, 1 - in_flight)
        capacity, free = nodes.capacity[rows], nodes.rows_free[rows, STANDARD]
        reserved = np.floor(np.where(np.isfinite(capacity), capacity, 0.0) * KEPT_SHARE)
        best_effort = nodes.best_effort[rows]
        limits = np.minimum(self._limits(nodes, rows, best_effort), capacity - reserved)
        usable = ~nodes.full[rows] & (nodes.kv_room[rows, STANDARD] > 0)
        spare = np.where(usable, np.clip(np.minimum(free - reserved, limits - best_effort), 0.0, None), 0.0)
        # Nodes' reports are slightly outdated.
        return float(max(0.0, min(np.sum(spare), np.sum(limits) - in_flight)))

    def _limits(self, nodes: NodeTable, rows: np.ndarray, best_effort: np.ndarray) -> np.ndarray:
        """Returns f64[C]: the maximum best-effort requests on each of the C nodes `rows`. It is infinite for a node
        without interactive requests."""
        requests, per_row = nodes.requests[rows], nodes.decode_per_row[rows]
        base, flat = nodes.decode_base[rows], nodes.flat_rows[rows]
        # Assumes that contexts and ranks of each request cost the mean of the running requests.
        by_rows = base + per_row * np.maximum(requests - flat, 0.0)
        each = np.maximum(nodes.decode_there[rows] - by_rows, 0.0) / np.maximum(requests, 1.0)
        interactive = requests - best_effort
        called = self._are_called(nodes, rows, interactive > 0)
        interactive = np.maximum(interactive, 1.0)
        longer = LONGER_SHARE * (base + per_row * np.maximum(interactive - flat, 0.0) + each * interactive)
        left_flat = np.maximum(flat - interactive, 0.0)
        limits = np.minimum(_quotient(longer, each), _quotient(longer + per_row * left_flat, each + per_row))
        limits = np.where(nodes.modelled[rows], limits, UNKNOWN_SHARE * nodes.capacity[rows])
        return np.where(called, np.floor(limits), np.inf)

    def _are_called(self, nodes: NodeTable, rows: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """Returns bool[C]: whether each of the C nodes `rows` has, or recently had, interactive requests. `busy`:
        bool[C], those that have some now."""
        if not self._called.size:
            self._called = np.full(len(nodes.live), -np.inf)
        now = self._clock()
        self._called[rows[busy]] = now
        return np.asarray(now - self._called[rows] < CALLED_S)


def _quotient(of: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Returns `of` / `by`, elementwise; infinite where `by` is 0."""
    return np.asarray(np.divide(of, by, out=np.full(len(of), np.inf), where=by > 0))
