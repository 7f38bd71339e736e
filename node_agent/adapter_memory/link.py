"""A simulated link between memory tiers: it delays transfers and never changes data.

Flows share the bandwidth equally (processor sharing); the transfers of one flow follow each other. Progress is kept in
virtual time: the bytes that a flow which was never idle would have carried. It grows by bandwidth / active flows per
second: one number gives the progress of every flow, and a flow that joins or ends changes its slope alone.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from node_agent.config import LinkConfig

LONGEST_WAIT = 1.0
"""Seconds after which a waiter looks again, whatever happens."""

log = logging.getLogger(__name__)


class LinkClosed(RuntimeError):
    """The transfer will not arrive any more."""


@dataclass(order=True)
class Transfer:
    """Transfer of a flow."""

    target: float
    """virtual time at which its last byte is across"""
    flow: Flow = field(compare=False)
    crossed: float | None = field(default=None, compare=False)
    """time of its end, by the clock"""


@dataclass(eq=False)
class Flow:
    """Transfers that follow each other, with one share of the link among them. It leaves when no more will come."""

    target: float = 0.0
    """virtual time at which all that it has been given is across"""
    closed: bool = False


class Link:
    """Simulated link; without a config it carries everything at once. Any thread may call it."""

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
        """Returns when `size` bytes would have arrived. Raises LinkClosed when the link is closed before."""
        self.wait(self.begin(Flow(), size))

    def begin(self, flow: Flow, size: int) -> Transfer:
        """Sends `size` bytes of the flow on their way, behind those that it sent before. Returns their transfer."""
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
        """Returns when the transfer has arrived. Raises LinkClosed when its flow or the link is closed before."""
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
                self._changed.wait(
                    min(remaining_s, LONGEST_WAIT)
                )  # flows that joined meanwhile made it later: look again

    @property
    def active(self) -> int:
        """Returns how many flows share the link now."""
        with self._changed:
            self._advance(self.clock())
            return len(self._active)

    def leave(self, flow: Flow) -> None:
        """Takes the flow off the link: what has not arrived never will, and the other flows have its share."""
        with self._changed:
            self._advance(self.clock())
            flow.closed = True
            if flow in self._active:
                self._active.remove(flow)
            self._pending = [transfer for transfer in self._pending if transfer.flow is not flow]
            heapq.heapify(self._pending)
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the link: every wait ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- inside, under the lock

    def _advance(self, now: float) -> None:
        """Brings the virtual time to `now`, and notes when transfers crossed."""
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
        """Returns when the transfer has arrived, or will if no other flow joins or leaves; in seconds of the clock."""
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
