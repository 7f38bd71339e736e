"""Snapshot of the nodes in one process: their latest records, when each was last seen, and reserved places.

The book does not decide who may write to it. MemoryClusterState owns one; RedisClusterState keeps one as a mirror.
`now` is monotonic seconds of this process. `report_time` and `last_seen` are seconds of the clock by which the age of
records is measured. Both clocks are the same, unless the owner knows of periods in which no record could arrive: the
clock of `report_time` leaves these out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from cluster.news import FULL_REPORT, Heartbeat, NodeRecord, NodeReport, Resident, facts_from, full_report, record_from
from cluster.node_table import Demand, NodeTable

FORGET_SECONDS = 60.0
"""Seconds for which an expired record is kept, counted from when the node was last seen. Until then a reader of a
stream can ask how long the node has been silent."""
PAST_EPOCHS = 8
"""Number of replaced epochs remembered per node, so that a delayed record can't revive a dead process."""


class TooManyNodes(ValueError):
    """The book already has `max_nodes` other nodes."""


class NodeView(msgspec.Struct, frozen=True):
    """A live node as the scheduler sees it."""

    record: NodeRecord
    reserved: int
    """Number of reserved places that the node has not acknowledged yet."""
    age: float
    """Seconds since the record arrived, by the receiver's clock."""
    residents: Mapping[str, Resident]
    """Adapters that the node holds, by digest. A live view: it changes with the node's reports."""


class _Place(NamedTuple):
    """A place reserved on a node."""

    end: float
    """Monotonic time (seconds) at which the reservation expires."""
    number: int
    """Number of the place (cluster.received); 0: the place has no number."""


class _Node:
    def __init__(self, row: int) -> None:
        self.row = row
        self.record: NodeRecord
        self.at = 0
        """Number of the last known change of the node's facts and residents."""
        self.places: dict[str, _Place] = {}
        """Reserved places by request."""
        self.past: deque[str] = deque(maxlen=PAST_EPOCHS)
        """Replaced epochs of the node, oldest first."""


class NodeBook:
    """Records of the nodes, their residents and reserved places in one process. Not thread-safe."""

    def __init__(self, *, expiry: float, max_nodes: int, forget_seconds: float = FORGET_SECONDS) -> None:
        self.expiry = expiry
        self.max_nodes = max_nodes
        self.forget_seconds = forget_seconds
        self.table = NodeTable(max_nodes)
        self._next_expiry = math.inf
        """Lower bound on the time at which the next live node expires, by the clock of `report_time`."""
        self._nodes: dict[str, _Node] = {}
        self._ends: list[tuple[float, str, str]] = []
        """Heap of (end, node id, request id). Entries of places that ended early stay until their `end`."""

    def record(self, node_id: str) -> NodeRecord | None:
        """Returns the node's latest record; None for an unknown node."""
        node = self._nodes.get(node_id)
        return None if node is None else node.record

    def last_seen(self, node_id: str) -> float:
        """Returns the time at which the node's last record arrived, by the clock of `report_time`; -inf for an unknown
        node."""
        node = self._nodes.get(node_id)
        return -math.inf if node is None else float(self.table.last_seen[node.row])

    def ids(self) -> list[str]:
        """Returns the ids of all nodes in the book, expired ones included."""
        return list(self._nodes)

    def is_newer(self, heartbeat: Heartbeat, report_time: float) -> bool:
        """Returns whether the heartbeat is newer than the known record of its node. Within an epoch the greater `seq`
        is newer. A new epoch is a new process, and so is newer. A replaced epoch counts as newer again once the epoch
        that replaced it has been silent for `expiry` seconds: a delayed heartbeat of a dead process may have replaced
        the live one."""
        node = self._nodes.get(heartbeat.id)
        if node is None:
            return True
        if heartbeat.epoch == node.record.epoch:
            return heartbeat.seq > node.record.seq
        return heartbeat.epoch not in node.past or report_time - self.last_seen(heartbeat.id) >= self.expiry

    def needs_full_report(self, news: NodeReport) -> bool:
        """Returns whether the report builds on changes that this book has not received."""
        changes = news.changes
        if changes.since == FULL_REPORT:
            return news.facts is None
        node = self._nodes.get(news.heartbeat.id)
        return node is None or node.record.epoch != news.heartbeat.epoch or changes.since > node.at

    def put(self, news: NodeReport, last_seen: float) -> None:
        """Applies a node's report, whatever its `seq`. The report must not need a full report first
        (`needs_full_report`). Frees the places of requests that the node has received, and all places of an earlier
        epoch. Raises TooManyNodes."""
        heartbeat, changes, is_whole = news.heartbeat, news.changes, news.changes.since == FULL_REPORT
        node = self._nodes.get(heartbeat.id)
        if node is None and len(self._nodes) >= self.max_nodes:
            raise TooManyNodes(f"{self.max_nodes} nodes are known already; {heartbeat.id} was not added")
        places = node.places.items() if node is not None else ()
        received = [request for request, place in places if heartbeat.received.has(place.number)]
        facts = news.facts if news.facts is not None or node is None else facts_from(node.record)
        assert facts is not None
        record = record_from(heartbeat, facts)
        residents, changed = (changes.residents, []) if is_whole else (None, changes.residents)
        row = self.table.put(record, last_seen, residents=residents, changed=changed, acknowledged=received)
        if node is None:
            node = self._nodes[heartbeat.id] = _Node(row)
        elif heartbeat.epoch != node.record.epoch:
            node.places.clear()
            if heartbeat.epoch in node.past:
                node.past.remove(heartbeat.epoch)
            node.past.append(node.record.epoch)
        for request_id in received:
            node.places.pop(request_id, None)
        node.record = record
        node.at = changes.at if is_whole else max(node.at, changes.at)
        self._next_expiry = min(self._next_expiry, last_seen + self.expiry)

    def full_report(self, node_id: str) -> NodeReport:
        """Returns a full report of a node that is in the book, for a receiver that knows nothing of it."""
        node = self._nodes[node_id]
        return full_report(node.record, list(self.table.residents(node.row).values()), node.at)

    def hold(self, node_id: str, request_id: str, demand: Demand, end: float, number: int = 0) -> None:
        """Reserves a place on the node for the request, until time `end` at the latest. Does nothing for an unknown
        node."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.places[request_id] = _Place(end, number)
        heapq.heappush(self._ends, (end, node_id, request_id))
        self.table.reserve(node.row, request_id, demand)

    def drop(self, node_id: str, request_id: str) -> bool:
        """Frees the request's place. Returns False, and changes nothing, when that place has already ended."""
        node = self._nodes.get(node_id)
        if node is None or node.places.pop(request_id, None) is None:
            return False
        self.table.release(node.row, request_id)
        return True

    def drop_all(self, node_id: str) -> None:
        """Frees all places reserved on the node."""
        node = self._nodes[node_id]
        for request_id in list(node.places):
            self.drop(node_id, request_id)

    def generation(self, node_id: str) -> int:
        """Returns the generation of the node's row in the table; 0 for an unknown node."""
        node = self._nodes.get(node_id)
        return 0 if node is None else int(self.table.generation[node.row])

    def set_generation(self, node_id: str, generation: int) -> None:
        """Sets the generation of the node's row in the table. Does nothing for an unknown node."""
        node = self._nodes.get(node_id)
        if node is not None:
            self.table.generation[node.row] = generation

    def current(self, now: float, report_time: float) -> NodeTable:
        """Returns the table as of now: expired places are freed, and nodes whose record has expired are not live."""
        while self._ends and self._ends[0][0] <= now:
            end, node_id, request_id = heapq.heappop(self._ends)
            node = self._nodes.get(node_id)
            place = node.places.get(request_id) if node is not None else None
            if place is not None and place.end == end:
                self.drop(node_id, request_id)
        self.table.now = report_time
        if report_time >= self._next_expiry:
            self._expire(report_time)
        return self.table

    def _expire(self, report_time: float) -> None:
        live = np.flatnonzero(self.table.live)
        late = report_time - self.table.last_seen[live] >= self.expiry
        for row in live[late]:
            self.table.expire(int(row))
        self._next_expiry = float(self.table.last_seen[live[~late]].min(initial=math.inf)) + self.expiry

    def views(self, now: float, report_time: float) -> list[NodeView]:
        """Returns the live nodes, ordered by id."""
        table = self.current(now, report_time)
        return [
            NodeView(
                record=node.record,
                reserved=len(table.reservations(node.row)),
                age=max(0.0, report_time - float(self.table.last_seen[node.row])),
                residents=table.residents(node.row),
            )
            for _, node in sorted(self._nodes.items())
            if table.live[node.row]
        ]

    def seconds_since_report(self, node_id: str, epoch: str, report_time: float) -> float:
        """Returns the seconds since a report of this epoch of the node last arrived. Returns infinity when the node has
        been forgotten or has another epoch."""
        node = self._nodes.get(node_id)
        if node is None or node.record.epoch != epoch:
            return math.inf
        return max(0.0, report_time - float(self.table.last_seen[node.row]))

    def forget(self, report_time: float) -> None:
        """Removes the nodes that have been silent for `forget_seconds`."""
        oldest = report_time - self.forget_seconds
        for node_id in [name for name, node in self._nodes.items() if self.table.last_seen[node.row] <= oldest]:
            self.remove(node_id)

    def remove(self, node_id: str) -> None:
        """Removes the node from the book and the table."""
        del self._nodes[node_id]
        self.table.remove(node_id)
