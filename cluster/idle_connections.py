"""Closes connections when file descriptors run short: idle ones first, and those that have not shown a key."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol

from cluster.descriptors import Descriptors


class Use(IntEnum):
    """Use of a connection, in the order in which connections are closed."""

    LINGERING = 0
    """The connection was answered for the last time, and what still arrives is dropped."""
    KEYLESS = 1
    """No request has shown a valid key, or the last one did not."""
    IDLE = 2
    """The last request had a valid key and has been answered."""
    BUSY = 3
    """A request is being answered. The connection is not closed."""


class Connection(Protocol):
    """Connection of a server."""

    began: float
    """Time at which the connection, or its latest request, began (seconds of the event loop)."""

    def use(self, now: float) -> Use:
        """Returns the connection's use at the time `now`."""

    def drop(self) -> None:
        """Closes the connection at once."""


def make_room(descriptors: Descriptors, connections: Iterable[Connection], newest: Connection, now: float) -> bool:
    """Closes connections, the longest unused first, if descriptors run short. Called for each new connection and each
    new request, `newest`.

    Returns False if too few descriptors are left for the request, even after that.
    """
    shortage = descriptors.shortage()
    if not shortage:
        return True
    uses = ((connection.use(now), connection.began, index, connection) for index, connection in enumerate(connections))
    closable = [entry for entry in uses if entry[0] != Use.BUSY and entry[-1] is not newest]
    # More than are missing, so that the next connections need no search.
    chosen = heapq.nsmallest(shortage + descriptors.reserve // 4, closable)
    for *_, connection in chosen:
        connection.drop()
    refused = descriptors.is_scarce(shortage - len(chosen))
    descriptors.record(len(chosen), refused)
    return not refused
