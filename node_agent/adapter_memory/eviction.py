"""Eviction policies: the order in which adapters leave a memory tier that needs room. Both tiers use the same policies.

The score of `cost` is what a page would save: expected calls per second (demand.py) x seconds to bring the adapter back
/ its pages. Tiers name as candidates only adapters that nobody leases, pins or writes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

from node_agent.adapter_memory.demand import MAX_REMEMBERED, Demand

HYSTERESIS = 0.25
"""An adapter that has just been brought in leaves only for others whose score is higher by this share."""
SETTLES_S = 30.0
"""Seconds after its arrival in which HYSTERESIS protects an adapter."""


class Candidate(NamedTuple):
    """An adapter that may leave a tier."""

    digest: str
    pages: int
    reload_s: float
    """expected seconds to bring it back, as loads went lately"""
    arrived: float
    """monotonic seconds of its arrival in this tier"""
    awaited: bool = False


class LeastRecentlyUsed:
    """Evicts the least recently used adapter first. Also the form of every policy: `score` is what the others
    change."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.evictions = 0
        """number of evictions that made room for other adapters"""

    def order(self, candidates: Sequence[Candidate], now: float) -> list[str]:
        """Returns the digests, the first to leave first. `candidates`: least recently used first, which decides
        between equal scores; awaited ones leave last. `now`: monotonic seconds."""
        scores = [inf if each.awaited else self.score(each, now) for each in candidates]
        return [candidates[i].digest for i in sorted(range(len(candidates)), key=scores.__getitem__)]

    def score(self, candidate: Candidate, now: float) -> float:  # noqa: ARG002 - as the others
        return 0.0

    def record_call(self, digest: str) -> None:
        """Notes that a request uses the adapter."""

    def record_eviction(self, digest: str) -> None:  # noqa: ARG002 - as the others
        """Notes that the adapter leaves to make room for another."""
        self.evictions += 1


class CostAware(LeastRecentlyUsed):
    def score(self, candidate: Candidate, now: float) -> float:
        digest, pages, reload_s, arrived, _ = candidate
        settling = HYSTERESIS if now - arrived < SETTLES_S else 0.0
        return self.demand.log_rate(digest, arrived, now) + log(reload_s * (1 + settling) / max(1, pages))


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """Evicts the least called adapter first, by all calls that are remembered, also of times before it was last brought
    in."""

    def score(self, candidate: Candidate, now: float) -> float:  # noqa: ARG002 - as the others
        return self.demand.calls(candidate.digest)


class GreedyDualSizeFrequency(LeastRecentlyUsed):
    """L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HPL-98-69:
    priority = clock at the last call + calls since it last left x cost / size; the clock is the last victim's
    priority."""

    def __init__(self, demand: Demand) -> None:
        super().__init__(demand)
        self._clock = 0.0
        self._uses: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Calls by digest, and the clock at the last one. Only as many as Demand remembers."""
        self._scores: dict[str, float] = {}
        """scores of the last order"""

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
"""Values of `node.eviction`"""
