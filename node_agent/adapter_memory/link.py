"""Simulated link between memory tiers. It delays transfers but never changes data.

Flows share the bandwidth equally (processor sharing); the transfers of one flow are sequential. Virtual time is the
number of bytes that a permanently active flow would have carried. It grows by bandwidth / active flows per second. One
number thus gives the progress of all flows: a flow that joins or leaves changes only the slope.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from node_agent.config import LinkConfig

MAX_WAIT_S = 1.0
"""Seconds after which a thread that waits for a transfer checks it again even if nothing changed."""

log = logging.getLogger(__name__)


class LinkClosed(RuntimeError):
    """Raised when a transfer will never arrive, since its flow or the link was closed."""


@dataclass(order=True)
class Transfer:
    """Part of a flow: bytes that count as arriving together."""

    target: float
    """virtual time (bytes) at which its last byte has crossed"""
    flow: Flow = field(compare=False)
    crossed: float | None = field(default=None, compare=False)
    """clock time, in seconds, at which its last byte crossed; None until then"""


@dataclass(eq=False)
class Flow:
    """Sequence of transfers that shares the link with other flows. `Link.leave` ends it."""

    target: float = 0.0
    """virtual time (bytes) at which the bytes of all its transfers so far have crossed"""
    closed: bool = False


class Link:
    """Simulated link. Without a config, transfers arrive at once. Any thread may call it."""

    def __init__(
        self, config: LinkConfig | None, name: str = "link", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.clock = config, clock
        self._changed = threading.Condition()
        self._virtual = 0.0
        self._at = clock()
        self._active: list[Flow] = []
        self._pending: list[Transfer] = []
        self._closed = False
        if config is not None:
            log.warning(
                "a simulated link delays transfers",
                extra={"link": name, "bytes_per_second": config.bandwidth, "latency": config.latency},
            )

    def carry(self, size: int) -> None:
        """Blocks until `size` bytes would have arrived. Raises LinkClosed when the link is closed first."""
        self.wait(self.begin(Flow(), size))

    def begin(self, flow: Flow, size: int) -> Transfer:
        """Starts a transfer of `size` bytes, after the flow's earlier ones. Returns it."""
        with self._changed:
            self._advance(self.clock())
            if self.config is None or flow.closed or self._closed:
                return Transfer(self._virtual, flow, crossed=self._at)
            if flow not in self._active:
                flow.target = self._virtual
                self._active.append(flow)
            flow.target += size
            transfer = Transfer(flow.target, flow)
            heapq.heappush(self._pending, transfer)
            return transfer

    def wait(self, transfer: Transfer) -> None:
        """Blocks until the transfer has arrived. Raises LinkClosed when its flow or the link is closed first."""
        if self.config is None:
            return
        with self._changed:
            while True:
                now = self.clock()
                self._advance(now)
                if transfer.flow.closed or self._closed:
                    raise LinkClosed("the node is stopping, or nobody waits for this load")
                remaining_s = self._arrival(transfer) - now
                if remaining_s <= 0:
                    return
                self._changed.wait(min(remaining_s, MAX_WAIT_S))  # joining flows delay the arrival: check again

    @property
    def active(self) -> int:
        """Returns the number of flows that share the link now."""
        with self._changed:
            self._advance(self.clock())
            return len(self._active)

    def leave(self, flow: Flow) -> None:
        """Removes the flow from the link. Its pending transfers never arrive; the other flows get its share."""
        with self._changed:
            self._advance(self.clock())
            flow.closed = True
            if flow in self._active:
                self._active.remove(flow)
            self._pending = [transfer for transfer in self._pending if transfer.flow is not flow]
            heapq.heapify(self._pending)
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the link and ends all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- inside, under the lock

    def _advance(self, now: float) -> None:
        """Advances virtual time to `now` and records when transfers crossed."""
        if self.config is None:
            return
        while self._active:
            end = min(flow.target for flow in self._active)
            slope = self.config.bandwidth / len(self._active)
            reached = self._at + (end - self._virtual) / slope
            to = end if reached <= now else self._virtual + (now - self._at) * slope
            while self._pending and self._pending[0].target <= to:
                transfer = heapq.heappop(self._pending)
                transfer.crossed = min(now, self._at + (transfer.target - self._virtual) / slope)
            self._virtual, self._at = to, min(reached, now)
            if reached > now:
                break
            self._active = [flow for flow in self._active if flow.target > end]
        self._at = now

    def _arrival(self, transfer: Transfer) -> float:
        """Returns the clock time in seconds at which the transfer arrives, if no flow joins or leaves before."""
        assert self.config is not None
        if transfer.crossed is not None:
            return transfer.crossed + self.config.latency
        at, virtual, ends = self._at, self._virtual, sorted(flow.target for flow in self._active)
        for done, end in enumerate(ends):
            slope = self.config.bandwidth / (len(ends) - done)
            if transfer.target <= end:
                return at + (transfer.target - virtual) / slope + self.config.latency
            at, virtual = at + (end - virtual) / slope, end
        raise AssertionError("a transfer that has not crossed belongs to an active flow")
