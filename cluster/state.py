"""What gateways know of nodes: their latest records, and places reserved on them but not yet acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from cluster.messages import check_version
from cluster.news import RECORD_EXPIRY, News, Resident
from cluster.node_book import FORGET_SECONDS, PAST_EPOCHS, NodeBook, NodeView, TooManyNodes
from cluster.node_table import Demand, NodeTable

__all__ = [
    "FORGET_SECONDS",
    "MAX_NODES",
    "PAST_EPOCHS",
    "RESERVATION_SECONDS",
    "ClusterState",
    "MemoryClusterState",
    "NodeView",
    "TooManyNodes",
]

RESERVATION_SECONDS = 5.0
"""A place that no record acknowledged by then is free again: the request never reached the node."""
MAX_NODES = 1024


Taken = Literal["taken", "older", "gap"]
"""What became of news: they are older than what is known; or they build on what is not, and all is to be told."""


class ClusterState(Protocol):
    """Shared by everything that places requests; methods are async because a shared state lives elsewhere."""

    async def publish(self, news: News) -> Taken:
        """Take in what a node tells. Raises VersionMismatch, TooManyNodes."""
        ...

    def residents(self, node_id: str, epoch: str) -> Mapping[str, Resident] | None:
        """What this process of the node holds, by digest; None when it is not known. Not to be changed."""
        ...

    async def table(self) -> NodeTable:
        """This process's picture of the nodes, with what is known now. No round trip to anywhere."""
        ...

    async def nodes(self) -> list[NodeView]:
        """Every node whose record has not expired, in the order of their ids."""
        ...

    async def reserve(self, node_id: str, request_id: str, demand: Demand, seen: int | None) -> int | None:
        """Take a place on a live node: its number, by which the node says that the request came (0: it ends by itself).
        None when the node is full or gone, or when its generation is no longer `seen` (None: whatever it is); the table
        then shows why. At most one round trip."""
        ...

    async def release(self, node_id: str, request_id: str) -> None:
        """Give a place back that will not be used. Nothing happens when the reservation has ended already."""
        ...

    async def silence(self, node_id: str, epoch: str) -> float:
        """Seconds since this epoch of the node was heard of; infinite when it is forgotten or replaced."""
        ...

    @property
    def stale(self) -> float | None:
        """Seconds since the picture was last in step with the other gateway workers'; None while it is."""
        ...


class MemoryClusterState:
    """The state of one gateway process. `clock` is monotonic seconds of this process."""

    stale: float | None = None

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        expiry: float = RECORD_EXPIRY,
        reservation_seconds: float = RESERVATION_SECONDS,
        max_nodes: int = MAX_NODES,
        forget_seconds: float = FORGET_SECONDS,
    ) -> None:
        self._clock = clock
        self._reservation_seconds = reservation_seconds
        self._next_place = time.time_ns() // 1000
        """Counted from the clock, so that numbers of a gateway before do not come again."""
        self._book = NodeBook(expiry=expiry, max_nodes=max_nodes, forget_seconds=forget_seconds)

    async def publish(self, news: News) -> Taken:
        check_version(news.beat.v)
        now = self._clock()
        self._book.forget(now)
        return take_in(self._book, news, now)

    def residents(self, node_id: str, epoch: str) -> Mapping[str, Resident] | None:
        return self._book.residents(node_id, epoch)

    async def table(self) -> NodeTable:
        now = self._clock()
        return self._book.current(now, now)

    async def nodes(self) -> list[NodeView]:
        now = self._clock()
        return self._book.views(now, now)

    async def reserve(self, node_id: str, request_id: str, demand: Demand, seen: int | None) -> int | None:
        number = self._next_place
        if not reserve_in(self._book, await self.table(), node_id, request_id, demand, seen, self._end(), number):
            return None
        self._next_place += 1
        return number

    async def release(self, node_id: str, request_id: str) -> None:
        self._book.drop(node_id, request_id)

    async def silence(self, node_id: str, epoch: str) -> float:
        return self._book.silence(node_id, epoch, self._clock())

    def _end(self) -> float:
        return self._clock() + self._reservation_seconds


def take_in(book: NodeBook, news: News, heard: float) -> Taken:
    """As ClusterState.publish, into this process's own book. Raises TooManyNodes."""
    if not book.is_newer(news.beat, heard):
        return "older"
    if book.lacks(news):
        return "gap"
    book.put(news, heard)
    return "taken"


def reserve_in(
    book: NodeBook,
    table: NodeTable,
    node_id: str,
    request_id: str,
    demand: Demand,
    seen: int | None,
    end: float,
    number: int = 0,
) -> bool:
    """A place as ClusterState.reserve takes one, in this process's own book. `table` is the book's, as it is now."""
    row = table.row(node_id)
    if (
        row is None
        or not table.live[row]
        or not table.takes(row, demand)
        or seen not in (None, int(table.generation[row]))
    ):
        return False
    book.hold(node_id, request_id, demand, end, number)
    return True
