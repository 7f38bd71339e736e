"""Computes the desired size of a pool from its load.

The load consists of queue wait, SLO attainment, and the demand according to the cost model. CPU utilisation is not
used. The current time is an argument. All times are in seconds. A node here means a unit of the pool's driver, which is
an instance in AWS.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a pool during the last interval, as measured by the gateway."""

    open_requests: int
    queue_wait: float
    demand: float
    """arriving work in nodes, that is seconds of a node's time per second, according to the cost model"""
    backlog: float
    attainment: float | None


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    min: int
    max: int
    queue_wait: float = 1.0
    attainment: float = 0.99
    utilisation: float = 0.7
    """share of the capacity that the demand may use; the rest is for bursts"""
    growth: float = 2.0
    """maximum factor by which one decision may increase the size; one more node is always allowed"""
    up_seconds: float = 15.0
    """seconds for which a larger size must be desired before the pool grows"""
    down_seconds: float = 300.0
    """seconds for which all decisions must be smaller than the pool; it then shrinks to the largest of these
    decisions"""
    scale_to_zero_after: float | None = None
    """idle seconds after which the last node ends; None keeps at least one node, even if `min` is 0"""


class Decision(msgspec.Struct, frozen=True):
    size: int
    reason: str


def desired_size(load: Load, current: int, targets: Targets) -> Decision:
    """Returns the desired size for this load, within the bounds, and the reason. Earlier loads are not considered."""
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
    """Smooths the decisions for one pool: it grows fast, shrinks slowly, and ends its last node most slowly."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._decisions: deque[tuple[float, int, int]] = deque()
        """past decisions as (time, size, size that counts for growth), for the longer of `up_seconds` and
        `down_seconds`"""
        self._started_at: float | None = None
        self._busy_at: float | None = None
        self._starting_at: float = -math.inf

    def decide(self, now: float, load: Load, current: int, *, starting: bool = False) -> Decision:
        """Returns the size to request, and the reason.

        `current` is the size that was last requested. `starting` means that some nodes are not ready yet; a queue wait
        then does not mean that there are too few nodes. After `starting` only the queue wait since that time counts.
        `now` must never decrease.
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
            return decision  # requests wait for the first node: grow without a window
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
        """Returns True if the sizer has made decisions for at least `seconds`.

        A new sizer has no decisions for earlier loads.
        """
        return self._started_at is not None and now - self._started_at >= seconds
