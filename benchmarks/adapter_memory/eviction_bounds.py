"""Bounds of eviction for a policy that knows all later calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.adapter_memory.eviction_traces import Trace
from node_agent.adapter_memory.eviction import Candidate

NEVER = 1 << 60


def next_calls(adapter: np.ndarray) -> np.ndarray:
    """i64[calls]: the index of the same adapter's next call; NEVER if there is none."""
    following = np.full(len(adapter), NEVER)
    upcoming: dict[int, int] = {}
    for i in range(len(adapter) - 1, -1, -1):
        name = int(adapter[i])
        following[i] = upcoming.get(name, NEVER)
        upcoming[name] = i
    return following


class Belady:
    """L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966, with sizes: who is called
    last of all leaves first, until there is room. Where a missed byte costs the same in every adapter, the saving per
    page and time does not depend on size, so that is also the greedy order by saving."""

    def __init__(self, trace: Trace) -> None:
        self._next = next_calls(trace.adapter).tolist()
        self._upcoming: dict[str, int] = {}
        self._at = 0

    def order(self, candidates: Sequence[Candidate], now: float) -> list[str]:  # noqa: ARG002 - as a policy
        return sorted((each.digest for each in candidates), key=self._upcoming.__getitem__, reverse=True)

    def record_call(self, digest: str) -> None:
        """Records a call. Must be called for every call of the trace, in order."""
        self._upcoming[digest] = self._next[self._at]
        self._at += 1

    def record_eviction(self, digest: str) -> None: ...


def min_miss_share(trace: Trace, pool: int) -> float:
    """Returns a lower bound on the share of the called bytes that any policy misses: PFOO-L of D. S. Berger, N.
    Beckmann and M. Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object Sizes", SIGMETRICS 2018.

    An adapter that stays until its next call occupies its pages for the calls between. Stays are granted in the order
    of pages times calls per byte saved, until the pool's pages times all calls are used up.
    """
    upcoming = next_calls(trace.adapter)
    stay = upcoming - np.arange(len(upcoming))
    returns = upcoming < NEVER
    sizes, pages = (np.array(of)[trace.adapter] for of in (trace.sizes, trace.pages))
    shortest = np.argsort((stay * pages / sizes)[returns], kind="stable")
    used = np.cumsum((stay * pages)[returns][shortest])
    hit = sizes[returns][shortest][used <= pool * len(upcoming)].sum()
    return float(1 - hit / sizes.sum())
