"""How many calls of batches may begin now, so that calls which somebody waits for find rows free and steps short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cluster.node_table import STANDARD, NodeTable

KEPT_SHARE = 1 / 8
"""Of a node's rows, rounded down: batches leave them free, for whoever comes next."""
LONGER_SHARE = 1 / 4
"""By so much of it batches may lengthen the decode step of the others on a node."""
UNKNOWN_SHARE = 1 / 8
"""Of a node's rows, at most, that batches have beside others where nothing is known of its steps."""
CALLED_S = 5.0
"""For so long after others' requests were last seen on a node it is taken to have one: the next is likely to come."""


class SpareRows:
    """Of one gateway worker. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._called = np.empty(0)
        """By the table's rows, when others' requests were last seen there."""

    def count(self, nodes: NodeTable, base: str, in_flight: int) -> float:
        """Returns how many more calls find a row that nobody waits for; infinite where a node does not report its rows.

        `in_flight`: calls of batches under way. While no node serves, one call asks for a node where an autoscaler is.
        """
        rows = nodes.serving(base).rows
        if not rows.size:
            return max(0, 1 - in_flight)
        capacity, free = nodes.capacity[rows], nodes.rows_free[rows, STANDARD]
        kept = np.floor(np.where(np.isfinite(capacity), capacity, 0.0) * KEPT_SHARE)
        best_effort = nodes.best_effort[rows]
        most = np.minimum(self._most(nodes, rows, best_effort), capacity - kept)
        usable = ~nodes.full[rows] & (nodes.kv_room[rows, STANDARD] > 0)
        spare = np.where(usable, np.clip(np.minimum(free - kept, most - best_effort), 0.0, None), 0.0)
        # What nodes tell is a moment old.
        return float(max(0.0, min(np.sum(spare), np.sum(most) - in_flight)))

    def _most(self, nodes: NodeTable, rows: np.ndarray, best_effort: np.ndarray) -> np.ndarray:
        """Returns how many best-effort requests each node may compute; infinite where nobody else calls."""
        requests, per_row = nodes.requests[rows], nodes.decode_per_row[rows]
        base, flat = nodes.decode_base[rows], nodes.flat_rows[rows]
        # Contexts and ranks cost of each request what they cost of those that run, on average.
        by_rows = base + per_row * np.maximum(requests - flat, 0.0)
        each = np.maximum(nodes.decode_there[rows] - by_rows, 0.0) / np.maximum(requests, 1.0)
        others = requests - best_effort
        called = self._are_called(nodes, rows, others > 0)
        others = np.maximum(others, 1.0)
        longer = LONGER_SHARE * (base + per_row * np.maximum(others - flat, 0.0) + each * others)
        left_flat = np.maximum(flat - others, 0.0)
        most = np.minimum(_quotient(longer, each), _quotient(longer + per_row * left_flat, each + per_row))
        most = np.where(nodes.modelled[rows], most, UNKNOWN_SHARE * nodes.capacity[rows])
        return np.where(called, np.floor(most), np.inf)

    def _are_called(self, nodes: NodeTable, rows: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """Returns where others' requests are, or lately were; takes note of where they are."""
        if not self._called.size:
            self._called = np.full(len(nodes.live), -np.inf)
        now = self._clock()
        self._called[rows[busy]] = now
        return np.asarray(now - self._called[rows] < CALLED_S)


def _quotient(of: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Returns infinity where `by` is 0."""
    return np.asarray(np.divide(of, by, out=np.full(len(of), np.inf), where=by > 0))
