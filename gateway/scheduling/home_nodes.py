"""Home nodes of adapters: the nodes to which an adapter is loaded before it is called.

They are the nodes that already have the adapter, then those drawn by rendezvous hashing of its digest. Routing charges
a node for the time that a call would wait for its adapter (rank_aware: `exposed`, `copy`), so calls go where the
adapter was loaded. Rendezvous hashing draws the same nodes in every gateway worker and spreads adapters evenly. When a
node joins or leaves, only its own adapters change nodes.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from cluster.node_table import ABSENT, NodeTable

_STEP, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of the splitmix64 hash."""


class HomeNodes:
    """Home nodes among the nodes that serve a base model now. The object does not follow changes of these nodes, so
    create a new one for each use."""

    def __init__(self, nodes: NodeTable, base: str) -> None:
        self._nodes = nodes
        self._rows = nodes.serving(base).rows
        self.rows = frozenset(self._rows.tolist())
        self._limits = nodes.rank_limit[self._rows]
        salts = [blake2b((nodes.ids[row] or "").encode(), digest_size=8).digest() for row in self._rows.tolist()]
        self._salts = np.frombuffer(b"".join(salts), np.uint64)

    def __len__(self) -> int:
        return int(self._rows.size)

    def of(self, digest: str, copies: int, rank: int = 0) -> list[int]:
        """Returns the rows of the adapter's first `copies` home nodes, or of all if there are fewer. Nodes that do not
        take its rank are left out.

        Nodes are ordered by tier (device, host, disk, absent), then by their hash.
        """
        tier_by_row = self._nodes.tiers(digest)
        rows, takes = self._rows.tolist(), self._limits >= rank
        tiers = np.array([tier_by_row.get(row, ABSENT) for row in rows]) if tier_by_row else np.full(len(rows), ABSENT)
        order = np.lexsort((_mixed(self._salts, int(digest[:16], 16)), tiers))
        rows_drawn: list[int] = self._rows[order[takes[order]][:copies]].tolist()
        return rows_drawn


def _mixed(salts: np.ndarray, seed: int) -> np.ndarray:
    """Returns u64[N]: the splitmix64 hash of each of the N salts XOR the seed."""
    mixed = (salts ^ np.uint64(seed)) + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    drawn: np.ndarray = mixed ^ (mixed >> np.uint64(31))
    return drawn
