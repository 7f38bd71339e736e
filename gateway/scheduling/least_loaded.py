"""The node with the fewest requests; of equals one that has the adapter already, then the one with more KV memory."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.state import NodeView
from gateway.scheduling.request import PlacementRequest


class LeastLoaded:
    def choose(self, candidates: Sequence[NodeView], request: PlacementRequest) -> str | None:
        if not candidates:
            return None
        return min(candidates, key=lambda node: _rank(node, request)).record.id


def _rank(node: NodeView, request: PlacementRequest) -> tuple[int, bool, int, str]:
    resident = request.digest is None or request.digest in node.tiers
    return node.load, not resident, -node.record.kv_blocks_free, node.record.id
