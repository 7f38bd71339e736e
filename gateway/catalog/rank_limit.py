"""Largest rank of an adapter that the service's nodes take: the limit of deploys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adapters.rank_limit import RankLimit
from cluster.device_memory import RANKS, with_rank
from cluster.news import NodeRecord

if TYPE_CHECKING:  # it loads numpy, which clients that import the deploy route's messages must not
    from cluster.state import ClusterState


async def rank_limit(cluster: ClusterState, base: str, configured: int) -> RankLimit | None:
    """Returns the limit of the nodes that serve the base model now, or `configured` if none has reported one. Returns
    None if a node takes any rank. `base`: fingerprint of the base model."""
    records = [node.record for node in await cluster.nodes()]
    serving = [record for record in records if record.base == base]
    starting = [record for record in records if not record.base]  # its base is known once its engine runs
    if any(not record.rank_limit for record in serving) or any(record.engine == "garnish" for record in starting):
        return None
    if not serving:
        return RankLimit(configured)
    return _limit_of(max(serving, key=lambda record: record.rank_limit))


def _limit_of(node: NodeRecord) -> RankLimit:
    """Returns the limit of a node, with the memory that its slots of each higher rank would take there."""
    memory = node.device_memory
    sums = {} if memory is None else {rank: str(with_rank(memory, node.rank_limit, rank)) for rank in RANKS}
    return RankLimit(node.rank_limit, {rank: f"{each} on node {node.id}" for rank, each in sums.items()})
