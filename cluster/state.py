"""What gateways know of nodes: their latest records, and places reserved on them but not yet acknowledged."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from cluster.messages import RECORD_EXPIRY, NodeRecord, check_version
from cluster.node_table import Demand, NodeTable

RESERVATION_SECONDS = 5.0
"""A place that no record acknowledged by then is free again: the request never reached the node."""
FORGET_SECONDS = 60.0
"""An expired record is kept this long, so that streams of a silent node can tell for how long it has been silent."""
MAX_NODES = 1024
PAST_EPOCHS = 8
"""Replaced epochs remembered per node, so that a record delayed on its way can't bring back a dead process."""


class TooManyNodes(ValueError):
    """The state is full of other nodes."""


class NodeView(msgspec.Struct, frozen=True):
    """A live node as the scheduler sees it."""

    record: NodeRecord
    reserved: int
    """Places given away that the node has not acknowledged yet."""
    age: float
    """Seconds since the record came in, by the receiver's clock."""
    tiers: Mapping[str, str]
    """Tier of each resident adapter by its digest: the record's `residents`, indexed once when it came in."""


class ClusterState(Protocol):
    """Shared by everything that places requests; methods are async because a shared state lives elsewhere."""

    async def publish(self, record: NodeRecord) -> bool:
        """Take a record in; False when it is older than what is known. Raises VersionMismatch, TooManyNodes."""
        ...

    async def table(self) -> NodeTable:
        """This process's picture of the nodes, with what is known now. No round trip to anywhere."""
        ...

    async def nodes(self) -> list[NodeView]:
        """Every node whose record has not expired, in the order of their ids."""
        ...

    async def reserve(self, node_id: str, request_id: str, demand: Demand, seen: int | None) -> bool:
        """Take a place on a live node. False when it is full or gone, or when its generation is no longer `seen` (None:
        whatever it is); the table then shows why. At most one round trip."""
        ...

    async def release(self, node_id: str, request_id: str) -> None:
        """Give a place back that will not be used. Nothing happens when the reservation has ended already."""
        ...

    async def silence(self, node_id: str, epoch: str) -> float:
        """Seconds since this epoch of the node was heard of; infinite when it is forgotten or replaced."""
        ...


def tiers_of(record: NodeRecord) -> dict[str, str]:
    return {entry.digest: entry.tier for entry in record.residents}


class _Node:
    def __init__(self, record: NodeRecord, heard: float) -> None:
        self.replace(record, heard)
        self.ends: dict[str, float] = {}
        """When each reservation ends by itself."""
        self.past: OrderedDict[str, None] = OrderedDict()

    def replace(self, record: NodeRecord, heard: float) -> None:
        self.record = record
        self.heard = heard
        self.tiers = tiers_of(record)


class MemoryClusterState:
    """The state of one gateway process. `clock` is monotonic seconds of this process."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        expiry: float = RECORD_EXPIRY,
        reservation_seconds: float = RESERVATION_SECONDS,
        max_nodes: int = MAX_NODES,
    ) -> None:
        self._clock = clock
        self._expiry = expiry
        self._reservation_seconds = reservation_seconds
        self._max_nodes = max_nodes
        self._nodes: dict[str, _Node] = {}
        self._table = NodeTable(max_nodes)

    async def publish(self, record: NodeRecord) -> bool:
        check_version(record.v)
        now = self._clock()
        self._forget(now)
        node = self._nodes.get(record.id)
        if node is None:
            if len(self._nodes) >= self._max_nodes:
                raise TooManyNodes(f"{self._max_nodes} nodes are known already; {record.id} was not added")
            node = self._nodes[record.id] = _Node(record, now)
        elif self._is_newer(node, record):
            node.replace(record, now)
        else:
            return False
        for request_id in record.acknowledged:
            node.ends.pop(request_id, None)
        self._table.put(record, now)
        return True

    async def table(self) -> NodeTable:
        now = self._table.now = self._clock()
        for node_id, node in self._nodes.items():
            row = self._row(node_id)
            self._table.live[row] = now - node.heard < self._expiry
            self._end_reservations(node, row, now)
        return self._table

    async def nodes(self) -> list[NodeView]:
        table, now = await self.table(), self._clock()
        return [
            NodeView(
                record=node.record,
                reserved=int(table.reserved[self._row(node_id)]),
                age=now - node.heard,
                tiers=node.tiers,
            )
            for node_id, node in sorted(self._nodes.items())
            if now - node.heard < self._expiry
        ]

    async def reserve(self, node_id: str, request_id: str, demand: Demand, seen: int | None) -> bool:
        table, node = await self.table(), self._nodes.get(node_id)
        if node is None:
            return False
        row = self._row(node_id)
        if not table.live[row] or not table.takes(row, demand) or seen not in (None, int(table.generation[row])):
            return False
        node.ends[request_id] = self._clock() + self._reservation_seconds
        table.reserve(row, request_id, demand)
        return True

    async def release(self, node_id: str, request_id: str) -> None:
        node = self._nodes.get(node_id)
        if node is not None:
            node.ends.pop(request_id, None)
            self._table.release(self._row(node_id), request_id)

    async def silence(self, node_id: str, epoch: str) -> float:
        node = self._nodes.get(node_id)
        if node is None or node.record.epoch != epoch:
            return math.inf
        return self._clock() - node.heard

    def _row(self, node_id: str) -> int:
        row = self._table.row(node_id)
        assert row is not None  # it has the nodes that we have
        return row

    def _is_newer(self, node: _Node, record: NodeRecord) -> bool:
        """Within an epoch the greater `seq` wins; a new epoch is a new process, whose places are all free."""
        if record.epoch == node.record.epoch:
            return record.seq > node.record.seq
        if record.epoch in node.past:
            return False
        node.past[node.record.epoch] = None
        if len(node.past) > PAST_EPOCHS:
            node.past.popitem(last=False)
        node.ends.clear()
        return True

    def _end_reservations(self, node: _Node, row: int, now: float) -> None:
        for request_id in [name for name, end in node.ends.items() if end <= now]:
            del node.ends[request_id]
            self._table.release(row, request_id)

    def _forget(self, now: float) -> None:
        for node_id in [name for name, node in self._nodes.items() if now - node.heard >= FORGET_SECONDS]:
            del self._nodes[node_id]
            self._table.remove(node_id)
