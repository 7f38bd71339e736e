"""Finds a node for a request: who can serve it, whom the policy prefers, and whether a place is still free there."""

from __future__ import annotations

import msgspec
import numpy as np

from cluster.errors import ServiceError
from cluster.node_table import Demand, NodeTable
from cluster.state import ClusterState
from gateway.scheduling.policy import Policy
from gateway.scheduling.request import PlacementRequest

RETRY_AFTER = 1.0
"""Seconds after which a caller may find a free place or a started node."""
ATTEMPTS = 4
"""Placements of one request: others may take the place that was chosen, or change what it was chosen by."""


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
    demand = Demand(request.rank, request.prompt_tokens, request.max_tokens, request.tpot, request.displaces)
    for attempt in range(ATTEMPTS):
        nodes = await state.table()
        serving = able(nodes, base, request, excluded)
        if not serving.size:
            raise ServiceError("unavailable", "no node is ready to serve this model", retry_after=RETRY_AFTER)
        free = serving[~(nodes.crammed if request.displaces else nodes.full)[serving]]
        row = policy.choose(nodes, free, request) if free.size else None
        if row is None:
            break
        record = nodes.record(row)
        # The last attempt takes the place whatever has changed meanwhile, if there is one.
        seen = int(nodes.generation[row]) if attempt < ATTEMPTS - 1 else None
        if await state.reserve(record.id, request.id, demand, seen):
            return Placed(node_id=record.id, epoch=record.epoch, url=record.url)
    raise ServiceError("overloaded", "every node's queue is full; try again later", retry_after=RETRY_AFTER)


def able(nodes: NodeTable, base: str, request: PlacementRequest, excluded: frozenset[str]) -> np.ndarray:
    """i64[C]: rows of the nodes that could serve the request if they had a free place, ascending."""
    rows = np.flatnonzero(nodes.live & nodes.ready & (nodes.max_context >= request.prompt_tokens + request.max_tokens))
    return np.array(
        [row for row in rows.tolist() if nodes.record(row).base == base and nodes.ids[row] not in excluded], np.int64
    )
