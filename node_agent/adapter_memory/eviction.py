"""Eviction policies: the order in which adapters leave a full memory tier. Both tiers use the same policies.

The score of `cost` is the value of keeping an adapter, per page: expected calls per second (demand.py) x seconds to
reload it / its pages. Candidates are only adapters that nobody leases, pins or writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

from node_agent.adapter_memory.demand import MAX_REMEMBERED, Demand

HYSTERESIS = 0.25
"""Share by which the score of a recently loaded adapter is raised, so that others need a higher score to evict it."""
SETTLES_S = 30.0
"""Seconds after its load in which HYSTERESIS protects an adapter."""


class Candidate(NamedTuple):
    """Adapter that may be evicted from a tier."""

    digest: str
    pages: int
    reload_s: float
    """expected seconds to load it again, at the rate of recent loads"""
    arrived: float
    """time of its arrival in this tier, in monotonic seconds"""
    awaited: bool = False


class LeastRecentlyUsed:
    """Policy that evicts the least recently used adapter first. Base class of the other policies, which override
    `score`."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.evictions = 0
        """number of evictions to make room for other adapters"""

    def order(self, candidates: Sequence[Candidate], now: float) -> list[str]:
        """Returns the digests in order of eviction: ascending scores, and awaited adapters last. `candidates` are in
        order of last use, which decides between equal scores. `now`: monotonic seconds."""
        scores = [inf if each.awaited else self.score(each, now) for each in candidates]
        return [candidates[i].digest for i in sorted(range(len(candidates)), key=scores.__getitem__)]

    def score(self, candidate: Candidate, now: float) -> float:  # noqa: ARG002 - as the others
        return 0.0

    def record_call(self, digest: str) -> None:
        """Records a request's use of the adapter."""

    def record_eviction(self, digest: str) -> None:  # noqa: ARG002 - as the others
        """Records that the adapter is evicted to make room for another."""
        self.evictions += 1


class CostAware(LeastRecentlyUsed):
    """Policy that evicts the adapter with the least expected reload time per page first."""

    def score(self, candidate: Candidate, now: float) -> float:
        digest, pages, reload_s, arrived, _ = candidate
        settling = HYSTERESIS if now - arrived < SETTLES_S else 0.0
        return self.demand.log_rate(digest, arrived, now) + log(reload_s * (1 + settling) / max(1, pages))


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """Policy that evicts the least called adapter first. It counts all remembered calls, including those before the
    last load."""

    def score(self, candidate: Candidate, now: float) -> float:  # noqa: ARG002 - as the others
        return self.demand.calls(candidate.digest)


class GreedyDualSizeFrequency(LeastRecentlyUsed):
    """Policy by L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy",
    HPL-98-69.

    Priority = clock at the adapter's last call + calls since its last eviction x reload seconds / pages. The clock is
    the priority of the adapter evicted last.
    """

    def __init__(self, demand: Demand) -> None:
        super().__init__(demand)
        self._clock = 0.0
        self._uses: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Calls since the last eviction, and the clock at the last call, by digest. Bounded by MAX_REMEMBERED."""
        self._scores: dict[str, float] = {}
        """scores of all candidates at the last call of `order`, by digest"""

    def order(self, candidates: Sequence[Candidate], now: float) -> list[str]:
        self._scores = {each.digest: self.score(each, now) for each in candidates}
        return super().order(candidates, now)

    def score(self, candidate: Candidate, now: float) -> float:  # noqa: ARG002 - as the others
        uses, clock = self._uses.get(candidate.digest, (1, 0.0))
        return clock + uses * candidate.reload_s / max(1, candidate.pages)

    def record_call(self, digest: str) -> None:
        uses, _ = self._uses.pop(digest, (0, 0.0))
        self._uses[digest] = uses + 1, self._clock
        if len(self._uses) > MAX_REMEMBERED:
            self._uses.popitem(last=False)

    def record_eviction(self, digest: str) -> None:
        super().record_eviction(digest)
        self._uses.pop(digest, None)
        self._clock = max(self._clock, self._scores.get(digest, 0.0))


POLICIES: dict[str, type[LeastRecentlyUsed]] = {
    "cost": CostAware,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "gdsf": GreedyDualSizeFrequency,
}
"""Policy for each value of `node.eviction`."""
