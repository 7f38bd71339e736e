"""The desired size of a pool from its load: queue wait, attainment of SLOs, the cost model's capacity; never CPU use.

Pure: time is passed in, and nothing is read or changed elsewhere. Times are in seconds.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's load over the last interval, as its gateway sees it."""

    open_requests: int
    """Running and waiting, those held for an empty pool included."""
    queue_wait: float
    """Of the request that has waited longest; 0 when none waits."""
    demand: float
    """Work that arrives per second, in nodes: seconds of one node's time by the cost model."""
    backlog: float
    """Work that waits, in seconds of one node's time by the cost model."""
    attainment: float | None
    """Share of the requests that met their SLO; None without requests or SLOs."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    min: int
    max: int
    queue_wait: float = 1.0
    """Longer than that is too long to wait."""
    attainment: float = 0.99
    utilisation: float = 0.7
    """Share of the capacity that the demand may take: arrivals come in bursts."""
    growth: float = 2.0
    """A size is at most multiplied by this in one step, and at least one node more is always allowed."""
    up_seconds: float = 15.0
    """A larger size is taken when it was wanted for so long ..."""
    down_seconds: float = 300.0
    """... and a smaller one when nothing larger was wanted for so long."""
    scale_to_zero_after: float | None = None
    """None: at least one node stays, whatever `min` says."""


class Decision(msgspec.Struct, frozen=True):
    size: int
    reason: str


def wanted(load: Load, current: int, targets: Targets) -> Decision:
    """Returns the size that this load alone asks for, within the bounds, and the reason."""
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
    most = max(current + 1, math.floor(current * targets.growth))
    return _bounded(Decision(min(chosen.size, most), chosen.reason), targets)


def _bounded(decision: Decision, targets: Targets) -> Decision:
    least = targets.min
    if targets.scale_to_zero_after is None:
        least = max(least, min(1, targets.max))
    size = max(least, min(decision.size, targets.max))
    if size == decision.size:
        return decision
    return Decision(size, f"{decision.reason}, and {'min' if size > decision.size else 'max'} is {size}")


class Sizer:
    """Steadies the decisions of one pool: quick to grow, slow to shrink, and slowest to give up the last node."""

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self._asked: deque[tuple[float, int, int]] = deque()
        """(when, size, size that is a reason to grow) of the decisions within the longer window."""
        self._begun: float | None = None
        self._busy: float | None = None
        """When there was work for the last time."""
        self._starting: float = -math.inf
        """When nodes that had been asked for were not ready yet, for the last time."""

    def decide(self, now: float, load: Load, current: int, *, starting: bool = False) -> Decision:
        """Returns the size to ask for and the reason; `current` is the size that was last asked for.

        `starting`: not all of it is ready yet, and that calls wait does not tell that it is too small. Once it is, a
        wait counts from then on. `now` never goes back.
        """
        if starting:
            self._starting = now
        else:
            load = msgspec.structs.replace(load, queue_wait=min(load.queue_wait, now - self._starting))
        decision = wanted(load, current, self.targets)
        patient = msgspec.structs.replace(load, queue_wait=0.0, attainment=None) if starting else load
        self._note(now, decision.size, wanted(patient, current, self.targets).size, load)
        if decision.size > current:
            return self._grown(now, decision, current)
        if decision.size < current:
            return self._shrunk(now, decision, current)
        return decision

    def _note(self, now: float, size: int, sure: int, load: Load) -> None:
        self._begun = now if self._begun is None else self._begun
        if load.open_requests or load.demand or self._busy is None:
            self._busy = now
        self._asked.append((now, size, sure))
        longest = max(self.targets.up_seconds, self.targets.down_seconds)
        while len(self._asked) > 1 and self._asked[1][0] <= now - longest:
            self._asked.popleft()

    def _grown(self, now: float, decision: Decision, current: int) -> Decision:
        if current == 0:
            return decision  # someone waits for the first node: no window
        least = min(sure for when, _, sure in self._asked if when >= now - self.targets.up_seconds)
        if not self._known_for(now, self.targets.up_seconds) or least <= current:
            return Decision(current, "more nodes have not been wanted for long enough")
        return Decision(min(least, decision.size), decision.reason)

    def _shrunk(self, now: float, decision: Decision, current: int) -> Decision:
        most = max(size for when, size, _ in self._asked if when >= now - self.targets.down_seconds)
        if not self._known_for(now, self.targets.down_seconds):
            most = max(most, current)
        if most == 0 and not self._idle_for_long(now):
            most = 1
        if most >= current:
            return Decision(current, "fewer nodes have not been enough for long enough")
        return Decision(most, decision.reason)

    def _idle_for_long(self, now: float) -> bool:
        after = self.targets.scale_to_zero_after
        return after is not None and self._busy is not None and now - self._busy >= after

    def _known_for(self, now: float, seconds: float) -> bool:
        """Whether decisions have been made for so long: a sizer that has just begun knows nothing of before."""
        return self._begun is not None and now - self._begun >= seconds
