"""What nodes tell, for tests that state a node's batch and queue as lists: the sums are made of them as of an earlier
release's record."""

from __future__ import annotations

import math

from cluster.news import News, NodeRecord
from cluster.node_table import NodeTable
from cluster.old_record import OldRecord, news_of_old, record_of_old

__all__ = ["OldRecord", "news_of", "tell"]


def tell(table: NodeTable, told: OldRecord | NodeRecord, heard: float = math.nan) -> int:
    """Returns the row."""
    if isinstance(told, OldRecord):
        return table.put(record_of_old(told), heard, residents=told.residents, acknowledged=told.acknowledged)
    return table.put(told, heard)


def news_of(told: OldRecord) -> News:
    """All that there is to tell."""
    return news_of_old(told, None)
