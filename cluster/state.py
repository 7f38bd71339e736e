"""State of the nodes in gateways: their latest records, and places reserved on them but not yet acknowledged."""

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
"""A place that no record acknowledged by then is free again: the request never reached the node."""
MAX_NODES = 1024

PublishResult = Literal["taken", "older", "gap"]
"""`taken`: the news were applied. `older`: newer ones are known. `gap`: they build on news that never came, so that the
node must report everything."""


class StateSettings(TypedDict, total=False):
    expiry: float
    reservation_seconds: float
    max_nodes: int
    forget_seconds: float


class ClusterState(ABC):
    """Shared by everything that routes requests; methods are async because a shared state lives elsewhere.

    `clock` is monotonic seconds of this process; `aged` is the clock by which records grow old (cluster.node_book).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        aged: Callable[[], float],
        *,
        expiry: float = RECORD_EXPIRY,
        reservation_seconds: float = RESERVATION_SECONDS,
        max_nodes: int = MAX_NODES,
        forget_seconds: float = FORGET_SECONDS,
    ) -> None:
        self._clock, self._aged = clock, aged
        self._expiry, self._reservation_seconds = expiry, reservation_seconds
        self._book = NodeBook(expiry=expiry, max_nodes=max_nodes, forget_seconds=forget_seconds)

    @property
    @abstractmethod
    def stale(self) -> float | None:
        """The seconds since the snapshot was last in step with the other gateway workers'; None while it is."""

    @abstractmethod
    async def publish(self, news: NodeReport) -> PublishResult:
        """Takes in what a node reports. Raises VersionMismatch, TooManyNodes."""

    @abstractmethod
    async def reserve(
        self, node_id: str, request_id: str, demand: Demand, expected_generation: int | None
    ) -> int | None:
        """Reserves a place on a live node. Returns its number, by which the node reports that the request came (0: it
        ends by itself). Returns None when the node is full or gone. It does so, too, when its generation is not
        `expected_generation` (None: any); the table then shows why. At most one round trip."""

    @abstractmethod
    async def release(self, node_id: str, request_id: str) -> None:
        """Gives back a place that will not be used; does nothing when the reservation has ended already."""

    async def table(self) -> NodeTable:
        """Returns this process's snapshot of the nodes, with what is known now. No round trip to anywhere."""
        return self._book.current(self._clock(), self._aged())

    async def nodes(self) -> list[NodeView]:
        """Returns every node whose record has not expired, in the order of their ids."""
        return self._book.views(self._clock(), self._aged())

    async def silence(self, node_id: str, epoch: str) -> float:
        """Returns the seconds since this epoch of the node was last seen; infinite when it is forgotten or replaced."""
        return self._book.silence(node_id, epoch, self._aged())

    def _publish_here(self, news: NodeReport) -> PublishResult:
        """Takes the news into this process's own book, and returns what `publish` does. Raises TooManyNodes."""
        received_at = self._aged()
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
        """Reserves a place in this process's own book for `seconds` at most; returns False where `reserve` gives
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
    """The state of one gateway process."""

    stale = None

    def __init__(self, clock: Callable[[], float], **settings: Unpack[StateSettings]) -> None:
        super().__init__(clock, clock, **settings)
        self._next_place = time.time_ns() // 1000
        """Counted from the clock, so that numbers of a gateway before do not come again."""

    async def publish(self, news: NodeReport) -> PublishResult:
        check_version(news.heartbeat.v)
        self._book.forget(self._aged())
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
