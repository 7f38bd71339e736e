"""Loads of the node pools, as seen by this gateway worker.

Counts are of requests to nodes; a call has one per choice. Requests that no node could take, held or refused, belong to
no pool and are stored under None.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable

import msgspec

WINDOW = 10
"""Seconds over which arrivals and attained SLOs are counted, in slices of one second."""


class PoolLoad(msgspec.Struct, array_like=True):
    """Load of one pool, from one worker or several.

    Work is in seconds of one node's time, by the node's cost model.
    """

    pool: str | None
    """Name of the pool. It is empty for nodes without a pool, and None for requests that no node could take."""
    open: int = 0
    queue_wait: float = 0.0
    arrived: float = 0.0
    """Work of the requests that arrived within the window, on nodes with a measured model only."""
    backlog: float = 0.0
    promised: int = 0
    """Number of calls with an SLO that ended within the window."""
    attained: int = 0

    def add(self, load: PoolLoad) -> None:
        self.queue_wait = max(self.queue_wait, load.queue_wait)
        for name in ("open", "arrived", "backlog", "promised", "attained"):
            setattr(self, name, getattr(self, name) + getattr(load, name))

    @property
    def demand(self) -> float:
        """Returns the work that arrives per second: the number of nodes that it keeps busy."""
        return self.arrived / WINDOW

    @property
    def attainment(self) -> float | None:
        return self.attained / self.promised if self.promised else None


class _Pool:
    def __init__(self) -> None:
        self.open = 0
        self.waiting: dict[QueueSample, None] = {}
        self.slices: deque[tuple[int, PoolLoad]] = deque()

    def forget(self, second: int) -> None:
        """Removes the counts of seconds before the window. `second`: the current one."""
        while self.slices and self.slices[0][0] <= second - WINDOW:
            self.slices.popleft()

    def now(self, second: int) -> PoolLoad:
        """Returns the counts of the current second."""
        self.forget(second)
        if not self.slices or self.slices[-1][0] != second:
            self.slices.append((second, PoolLoad(None)))
        return self.slices[-1][1]


class QueueSample:
    """Entry of one request in the pools' loads. It lasts from the request's first wait to its end."""

    def __init__(self, loads: PoolLoads, since: float) -> None:
        self._loads = loads
        self.since = since
        self.work = 0.0
        self.pool: str | None = None
        self._there = self._counted = self._unplaced = False

    def wait(self, pool: str | None, work: float | None) -> None:
        """Records that the request waits for a node of the pool; None means any node. `work`: node time of the request
        in seconds. May be called again with another pool."""
        self.end()
        if self._unplaced and pool is not None:
            self.since = self._loads.clock()  # waiting for a first node must not count as overload of that node
        self._unplaced = pool is None
        self.pool, self.work, self._there = pool, work or 0.0, True
        entry = self._loads.pools[pool]
        entry.open += 1
        entry.waiting[self] = None
        if pool is not None and not self._counted:
            self._counted = True
            self._loads.slice(pool).arrived += self.work

    def begin(self) -> None:
        """Records that the request no longer waits."""
        if self._there:
            self._loads.pools[self.pool].waiting.pop(self, None)

    def end(self) -> None:
        """Records that the request has ended. Repeated calls have no effect."""
        if self._there:
            self.begin()
            self._loads.pools[self.pool].open -= 1
            self._there = False

    def restart(self) -> None:
        """Restarts the request's wait, because it moves to another node after it had begun."""
        self.since = self._loads.clock()

    def judge(self, is_attained: bool) -> None:
        """Counts a completed call with an SLO, and whether the SLO was attained."""
        counts = self._loads.slice(self.pool)
        counts.promised += 1
        counts.attained += is_attained


class PoolLoads:
    """Loads of all pools. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.pools: defaultdict[str | None, _Pool] = defaultdict(_Pool)

    def track(self, since: float) -> QueueSample:
        """Returns the sample of a request that arrived at `since`."""
        return QueueSample(self, since)

    def count_refused(self, work: float | None) -> None:
        """Counts the work of a request that was refused because all nodes were full."""
        self.slice(None).arrived += work or 0.0

    def here(self) -> list[PoolLoad]:
        """Returns the pools' loads as seen by this worker, and forgets pools without load."""
        now = self.clock()
        summed = [self._summed(name, pool, now) for name, pool in self.pools.items()]
        for name in [name for name, pool in self.pools.items() if not (pool.open or pool.slices)]:
            del self.pools[name]
        return summed

    def slice(self, pool: str | None) -> PoolLoad:
        """Returns the counts of the pool's current second."""
        return self.pools[pool].now(int(self.clock()))

    def _summed(self, name: str | None, pool: _Pool, now: float) -> PoolLoad:
        pool.forget(int(now))
        oldest = min((stay.since for stay in pool.waiting), default=now)
        summed = PoolLoad(name, pool.open, max(0.0, now - oldest), backlog=sum(stay.work for stay in pool.waiting))
        for _, counts in pool.slices:
            summed.add(counts)
        return summed


def add_up(loads: Iterable[PoolLoad]) -> dict[str | None, PoolLoad]:
    """Returns the sum of the loads by pool; the queue wait is the maximum."""
    sums: dict[str | None, PoolLoad] = {}
    for load in loads:
        sums.setdefault(load.pool, PoolLoad(load.pool)).add(load)
    return sums
