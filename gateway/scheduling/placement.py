"""Finds a node for a request: who can serve it, whom the policy prefers, and whether a place is still free there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.errors import ServiceError
from cluster.state import ClusterState, NodeView
from gateway.scheduling.policy import Policy
from gateway.scheduling.request import PlacementRequest

RETRY_AFTER = 1.0
"""Seconds after which a caller may find a free place or a started node."""


class Placed(msgspec.Struct, frozen=True):
    """A place reserved under the request's id on one process of a node."""

    node_id: str
    epoch: str
    url: str


async def place(
    state: ClusterState,
    policy: Policy,
    base: str,
    request: PlacementRequest,
    excluded: frozenset[str] = frozenset(),
) -> Placed:
    """Reserve a place. Raises ServiceError: `unavailable` when no node could serve, `overloaded` when all are full."""
    full: set[str] = set()
    for _ in range(1 + len(await state.nodes())):  # each round either ends or finds one more node full
        serving = [node for node in await state.nodes() if _serves(node, base, request, excluded)]
        if not serving:
            raise ServiceError("unavailable", "no node is ready to serve this model", retry_after=RETRY_AFTER)
        free = [node for node in serving if not node.full and node.record.id not in full]
        chosen = _record(free, policy.choose(free, request))
        if chosen is None:
            break
        if await state.reserve(chosen.record.id, request.id):
            return Placed(node_id=chosen.record.id, epoch=chosen.record.epoch, url=chosen.record.url)
        full.add(chosen.record.id)
    raise ServiceError("overloaded", "every node's queue is full; try again later", retry_after=RETRY_AFTER)


def _serves(node: NodeView, base: str, request: PlacementRequest, excluded: frozenset[str]) -> bool:
    record = node.record
    return (
        record.state == "ready"
        and record.base == base
        and record.id not in excluded
        and request.prompt_tokens + request.max_tokens <= record.max_context
    )


def _record(nodes: Sequence[NodeView], node_id: str | None) -> NodeView | None:
    return next((node for node in nodes if node.record.id == node_id), None)
