"""The desired size of a pool by its load: queue wait, SLO attainment, and the cost model's capacity; never CPU use.

The functions are pure: time is an argument. Times are in seconds.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's load over the last interval, as its gateway sees it."""

    open_requests: int
    """running and waiting requests, also those that wait for the first node"""
    queue_wait: float
    demand: float
    """arriving work in nodes: seconds of a node's time per second, by the cost model"""
    backlog: float
    """waiting work in seconds of a node's time, by the cost model"""
    attainment: float | None
    """share of requests that met their SLO; None without requests or SLOs"""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    min: int
    max: int
    queue_wait: float = 1.0
    attainment: float = 0.99
    utilisation: float = 0.7
    """share of the capacity that the demand may take, since arrivals come in bursts"""
    growth: float = 2.0
    """largest factor of one step; one more node is always allowed"""
    up_seconds: float = 15.0
    """time for which a larger size must be desired before the pool grows"""
    down_seconds: float = 300.0
    """time for which no larger size may be desired before the pool shrinks"""
    scale_to_zero_after: float | None = None
    """idle time after which the last node ends; None keeps one node, whatever `min` is"""


class Decision(msgspec.Struct, frozen=True):
    size: int
    reason: str


def desired_size(load: Load, current: int, targets: Targets) -> Decision:
    """Returns the desired size by this load alone, within the bounds, and the reason."""
    if load.open_requests == 0 and load.demand == 0:
        return _bounded(Decision(0, "idle"), targets)
    options = [
        Decision(math.ceil(load.demand / targets.utilisation), f"demand of {load.demand:.2f} nodes"),
        Decision(1, "requests are there"),
    ]
    if load.queue_wait > targets.queue_wait:
        needed = math.ceil(load.demand + load.backlog / targets.queue_wait)
        options.append(Decision(max(current + 1, needed), f"a queue wait of {load.queue_wait:.1f} s"))
    if load.attainment is not None and load.attainment < targets.attainment:
        options.append(Decision(current + 1, f"an attainment of {load.attainment:.3f}"))
    chosen = max(options, key=lambda option: option.size)
    max_step = max(current + 1, math.floor(current * targets.growth))
    return _bounded(Decision(min(chosen.size, max_step), chosen.reason), targets)


def _bounded(decision: Decision, targets: Targets) -> Decision:
    min_size = targets.min
    if targets.scale_to_zero_after is None:
        min_size = max(min_size, min(1, targets.max))
    size = max(min_size, min(decision.size, targets.max))
    if size == decision.size:
        return decision
    return Decision(size, f"{decision.reason}, and {'min' if size > decision.size else 'max'} is {size}")


class Sizer:
    """Smooths the decisions of one pool: fast to grow, slow to shrink, and slowest to end the last node."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._decisions: deque[tuple[float, int, int]] = deque()
        """decisions in the longer window, as (time, size, size that counts for growth)"""
        self._started_at: float | None = None
        self._busy_at: float | None = None
        self._starting_at: float = -math.inf

    def decide(self, now: float, load: Load, current: int, *, starting: bool = False) -> Decision:
        """Returns the size to request and the reason; `current` is the size that was last requested.

        With `starting` not all nodes are ready, and a queue wait does not mean that there are too few. Afterwards a
        wait counts from that time on. `now` never decreases.
        """
        if starting:
            self._starting_at = now
        else:
            load = msgspec.structs.replace(load, queue_wait=min(load.queue_wait, now - self._starting_at))
        decision = desired_size(load, current, self.targets)
        patient = msgspec.structs.replace(load, queue_wait=0.0, attainment=None) if starting else load
        self._record(now, decision.size, desired_size(patient, current, self.targets).size, load)
        if decision.size > current:
            return self._grown(now, decision, current)
        if decision.size < current:
            return self._shrunk(now, decision, current)
        return decision

    def _record(self, now: float, size: int, sure: int, load: Load) -> None:
        self._started_at = now if self._started_at is None else self._started_at
        if load.open_requests or load.demand or self._busy_at is None:
            self._busy_at = now
        self._decisions.append((now, size, sure))
        longest = max(self.targets.up_seconds, self.targets.down_seconds)
        while len(self._decisions) > 1 and self._decisions[1][0] <= now - longest:
            self._decisions.popleft()

    def _grown(self, now: float, decision: Decision, current: int) -> Decision:
        if current == 0:
            return decision  # someone waits for the first node: no window
        smallest = min(sure for when, _, sure in self._decisions if when >= now - self.targets.up_seconds)
        if not self._known_for(now, self.targets.up_seconds) or smallest <= current:
            return Decision(current, "more nodes have not been wanted for long enough")
        return Decision(min(smallest, decision.size), decision.reason)

    def _shrunk(self, now: float, decision: Decision, current: int) -> Decision:
        largest = max(size for when, size, _ in self._decisions if when >= now - self.targets.down_seconds)
        if not self._known_for(now, self.targets.down_seconds):
            largest = max(largest, current)
        if largest == 0 and not self._idle_for_long(now):
            largest = 1
        if largest >= current:
            return Decision(current, "fewer nodes have not been enough for long enough")
        return Decision(largest, decision.reason)

    def _idle_for_long(self, now: float) -> bool:
        after = self.targets.scale_to_zero_after
        return after is not None and self._busy_at is not None and now - self._busy_at >= after

    def _known_for(self, now: float, seconds: float) -> bool:
        """Returns True if the sizer has made decisions for `seconds`; a new one knows nothing of earlier loads."""
        return self._started_at is not None and now - self._started_at >= seconds
