"""The gateways' state of the nodes: their latest records, and the places reserved on them but not yet acknowledged."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypedDict, Unpack

from cluster.messages import check_version
from cluster.news import RECORD_EXPIRY, NodeReport
from cluster.node_book import FORGET_SECONDS, NodeBook, NodeView
from cluster.node_table import Demand, NodeTable

RESERVATION_SECONDS = 5.0
"""Seconds after which a reservation ends if no record of the node has acknowledged it. The request then never reached
the node."""
MAX_NODES = 1024

PublishResult = Literal["taken", "older", "gap"]
"""Result of `ClusterState.publish`. `taken`: the report was applied. `older`: a newer report is already known. `gap`:
the report builds on changes that were never received, so the node must send a full report."""


class StateSettings(TypedDict, total=False):
    """Optional settings of a ClusterState; times are in seconds."""

    expiry: float
    reservation_seconds: float
    max_nodes: int
    forget_seconds: float


class ClusterState(ABC):
    """State of the nodes, shared by everything that routes requests. Its methods are async because a shared state may
    be in Redis. `clock` returns monotonic seconds of this process. `report_clock` returns the time by which the age of
    records is measured (cluster.node_book)."""

    def __init__(
        self,
        clock: Callable[[], float],
        report_clock: Callable[[], float],
        *,
        expiry: float = RECORD_EXPIRY,
        reservation_seconds: float = RESERVATION_SECONDS,
        max_nodes: int = MAX_NODES,
        forget_seconds: float = FORGET_SECONDS,
    ) -> None:
        self._clock, self._report_clock = clock, report_clock
        self._expiry, self._reservation_seconds = expiry, reservation_seconds
        self._book = NodeBook(expiry=expiry, max_nodes=max_nodes, forget_seconds=forget_seconds)

    @property
    @abstractmethod
    def stale(self) -> float | None:
        """Seconds since this process's snapshot last agreed with those of the other gateway workers; None while it
        agrees."""

    @abstractmethod
    async def publish(self, news: NodeReport) -> PublishResult:
        """Applies a node's report to the state, and returns whether it was applied. Raises VersionMismatch or
        TooManyNodes."""

    @abstractmethod
    async def reserve(
        self, node_id: str, request_id: str, demand: Demand, expected_generation: int | None
    ) -> int | None:
        """Reserves a place on a live node and returns the number of the place. The node reports that number once the
        request has arrived. 0 is a place without a number, which ends when its time is over. Returns None when the node
        is full or not live. Also returns None when the node's generation is not `expected_generation` (None: any
        generation); the table then has the current one. Takes one round trip at most."""

    @abstractmethod
    async def release(self, node_id: str, request_id: str) -> None:
        """Frees a reserved place that will not be used. Does nothing when the reservation has already ended."""

    async def table(self) -> NodeTable:
        """Returns this process's current snapshot of the nodes. Makes no round trip."""
        return self._book.current(self._clock(), self._report_clock())

    async def nodes(self) -> list[NodeView]:
        """Returns the nodes whose record has not expired, ordered by id."""
        return self._book.views(self._clock(), self._report_clock())

    async def seconds_since_report(self, node_id: str, epoch: str) -> float:
        """Returns the seconds since a report of this epoch of the node last arrived. Returns infinity when the node has
        been forgotten or has a newer epoch."""
        return self._book.seconds_since_report(node_id, epoch, self._report_clock())

    def _publish_here(self, news: NodeReport) -> PublishResult:
        """Applies the report to this process's own book. Returns what `publish` returns. Raises TooManyNodes."""
        received_at = self._report_clock()
        if not self._book.is_newer(news.heartbeat, received_at):
            return "older"
        if self._book.needs_full_report(news):
            return "gap"
        self._book.put(news, received_at)
        return "taken"

    async def _reserve_here(
        self,
        node_id: str,
        request_id: str,
        demand: Demand,
        expected_generation: int | None,
        *,
        seconds: float,
        number: int,
    ) -> bool:
        """Reserves a place in this process's own book for `seconds` at most. Returns False where `reserve` returns
        None."""
        table = await self.table()
        row = table.row(node_id)
        if row is None or not table.live[row] or not table.takes(row, demand):
            return False
        if expected_generation not in (None, int(table.generation[row])):
            return False
        self._book.hold(node_id, request_id, demand, self._clock() + seconds, number)
        return True


class MemoryClusterState(ClusterState):
    """State of the nodes for a single gateway process, kept in memory."""

    stale = None

    def __init__(self, clock: Callable[[], float], **settings: Unpack[StateSettings]) -> None:
        super().__init__(clock, clock, **settings)
        self._next_place = time.time_ns() // 1000
        """Number of the next reserved place. The first one is the wall clock's microseconds, so that a restarted
        gateway does not reuse numbers."""

    async def publish(self, news: NodeReport) -> PublishResult:
        check_version(news.heartbeat.v)
        self._book.forget(self._report_clock())
        return self._publish_here(news)

    async def reserve(
        self, node_id: str, request_id: str, demand: Demand, expected_generation: int | None
    ) -> int | None:
        number, seconds = self._next_place, self._reservation_seconds
        if not await self._reserve_here(
            node_id, request_id, demand, expected_generation, seconds=seconds, number=number
        ):
            return None
        self._next_place += 1
        return number

    async def release(self, node_id: str, request_id: str) -> None:
        self._book.drop(node_id, request_id)
