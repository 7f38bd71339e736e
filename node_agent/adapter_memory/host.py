"""The host tier: adapters that are being read from the object store, or lie in host memory.

Called by the engine's thread alone; loader threads fill `pages` and say which layers are `here`. A load runs while
somebody waits for it (`announce` counts one in, `retract` out), the device is to copy from it, or CPU workers may read
it. A copy or a reading worker keeps its pages and its entry in the host table, whatever becomes of the load. A load is
as urgent as the most urgent of those who want it; one that finds no room takes it from less urgent ones.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain

from cluster.messages import Adapter
from cluster.residency import HeldTier
from node_agent.adapter_memory.eviction import Candidate, LeastRecentlyUsed
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.load_rates import LoadRates
from node_agent.adapter_memory.loader import Loader
from node_agent.adapter_memory.loader_threads import Priority
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.table import AdapterTable
from node_agent.states import HostState

FAILURE_MEMORY = 1.0
"""Seconds for which a failed load answers for itself: all who wait fail together, and later ones try again."""

REPEATED_SHARE = 0.2
"""Share of its score that an adapter keeps in host memory while it is on the device too. It is read there only if it
leaves the device before its next call. Tuned on one half of the traces of benchmarks/adapter_memory/eviction.py."""


class HostTier:
    """The adapters in host memory: `memory` bytes at most; what leaves first is up to `eviction`. What somebody waits
    for or copies from stays."""

    def __init__(
        self, loader: Loader, pool: Pool, table: AdapterTable, *, memory: int, eviction: LeastRecentlyUsed
    ) -> None:
        """`table` names the adapters' rows in `pool`, for CPU workers."""
        self.loader, self.pool, self.table, self.memory = loader, pool, table, memory
        self._free_slots = list(range(table.shape.slots - 1, -1, -1))
        self.failure_memory = FAILURE_MEMORY
        self.eviction, self.rates = eviction, LoadRates()
        self.pinned: frozenset[str] = frozenset()
        """digests of adapters that stay once they are here"""
        self.on_device: Container[str] = ()
        """digests of adapters that have a place on the device"""
        self.short: Priority | None = None
        """priority of the most urgent load that found no room at the last `poll`; None: all found some"""
        self._waiters: dict[str, Counter[Priority]] = {}
        self._spared: dict[str, Container[str]] = {}
        self._all: OrderedDict[str, HostAdapter] = OrderedDict()
        self._measuring: list[HostAdapter] = []
        self._unfetched: list[HostAdapter] = []
        self._fetching: list[HostAdapter] = []
        self._failed: deque[tuple[float, HostAdapter]] = deque()
        self._leaving: list[HostAdapter] = []
        """hosts that were forgotten and are still in use"""

    def get(self, digest: str) -> HostAdapter | None:
        return self._all.get(digest)

    def all(self) -> Iterable[HostAdapter]:
        """Returns every adapter of the host tier, also those that are arriving, or have failed a moment ago."""
        return self._all.values()

    def lacks_room(self, digest: str) -> bool:
        """Returns whether the adapter's load found no room at the last `poll`."""
        return any(host.digest == digest for host in self._unfetched)

    def waiting(self, digest: str) -> int:
        """Returns how many wait for the adapter."""
        return self._waiters[digest].total() if digest in self._waiters else 0

    def announce(self, digest: str, priority: Priority = Priority.REQUEST, spared: Container[str] = ()) -> None:
        """Counts one more who waits for the adapter; each call is answered by one `retract`. `spared`: digests of
        adapters that are not to be evicted for a predicted prefetch, until it is retracted."""
        self._waiters.setdefault(digest, Counter())[priority] += 1
        if priority == Priority.PREDICTED:
            self._spared[digest] = spared
        self._count(digest)

    def retract(self, digest: str, priority: Priority = Priority.REQUEST) -> None:
        """Counts one less who waits for the adapter. What nobody wants any more is dropped before it is whole."""
        counts = self._waiters[digest]
        counts[priority] -= 1
        if not counts[priority]:
            del counts[priority]
            if priority == Priority.PREDICTED:
                del self._spared[digest]
        if not counts:
            del self._waiters[digest]
        host = self._count(digest)
        if host is not None and host.unwanted and not host.complete and host not in self._fetching:
            self.forget(host)  # a thread that fetches it sees for itself

    def load(self, adapter: Adapter) -> HostAdapter:
        """Returns the adapter, whose load starts unless it runs, is done, or has just failed."""
        host = self._all.get(adapter.digest)
        if host is None or host.state is HostState.ABANDONED:
            host = self._begin(adapter.digest, adapter.artifact)
        self._all.move_to_end(adapter.digest)
        return host

    def poll(self) -> None:
        """Takes note of what loader threads have done, and starts fetches that now have room, the most urgent first,
        and of those the oldest."""
        self._measuring = [host for host in self._measuring if not self._book_header(host)]
        self._start_fetches()
        self._fetching = [host for host in self._fetching if not self._book_fetch(host)]
        leaving, self._leaving = self._leaving, []
        for host in leaving:
            self._free(host)
        now = time.monotonic()
        while self._failed and (self._failed[0][0] <= now or not self.failure_memory):
            self.forget(self._failed.popleft()[1])

    def complete(self) -> Iterable[HostAdapter]:
        return (host for host in self._all.values() if host.complete)

    def forget(self, host: HostAdapter) -> None:
        """Drops the adapter, and its bytes once nobody reads or writes them."""
        if self._all.get(host.digest) is host:
            del self._all[host.digest]
            host.waiters = 0  # callers wait for its next load: this one may end
            if not host.complete:
                self.loader.wake()  # others waited for it
        self._free(host)  # an adapter on the device keeps its HostAdapter, but not these bytes

    def hold(self, host: HostAdapter) -> bool:
        """Keeps the adapter's pages and its table entry until `let_go`. Returns False when it has none, or is on its
        way out."""
        if host.pages is None or host.failed or self._all.get(host.digest) is not host:
            return False
        host.holds += 1
        return True

    def let_go(self, host: HostAdapter) -> None:
        if host.holds <= 0:
            raise RuntimeError(f"a hold on {host.digest} was released twice")
        host.holds -= 1

    def lend(self, digest: str, layout: AdapterLayout) -> HostAdapter | None:
        """Gives room to an adapter of zeros that nobody deployed, for measurements, and holds it there until `let_go`;
        `forget` then gives the room back. May evict adapters that nobody wants. Returns None when there is no room."""
        run = self._make_room(layout.size, max(1, layout.rows))
        pages = None if run is None else self.pool.pages.take(layout.pages, digest)
        if run is None or pages is None:
            return None
        elements = self.pool.page_size // self.pool.data.element_size()
        for page in pages:
            self.pool.data[page * elements : (page + 1) * elements].zero_()
        here = bytearray(b"\1" * len(layout.layers))
        host = HostAdapter(digest, "", HostState.COMPLETE, layout=layout, here=here)
        host.pages, host.slot, host.run, host.arrived = pages, self._free_slots.pop(), run, time.monotonic()
        host.holds = 1
        self.table.set(host.slot, run, layout, layout.positions(pages))
        self._all[digest] = host
        return host

    def record_lease(self, host: HostAdapter, leased: bool) -> None:
        """Notes whether requests have leases on the adapter on the device."""
        host.leased = leased
        self._set_priority(host)

    def awaited(self) -> Iterator[str]:
        """Yields the digests for which requests or operators' prefetches wait; predicted prefetches step back."""
        return (digest for digest, counts in self._waiters.items() if min(counts) < Priority.PREDICTED)

    def bytes_awaited(self, elsewhere: Container[str]) -> int:
        """Returns the bytes of adapters that are `awaited`, except those `elsewhere`, those that failed and those whose
        header is still being read."""
        hosts = (self._all.get(digest) for digest in self.awaited() if digest not in elsewhere)
        return sum(
            host.layout.live for host in hosts if host is not None and host.layout is not None and not host.failed
        )

    def reload_seconds(self, digest: str, size: int) -> float:
        """Returns how long an adapter that left the device would take to come back."""
        host = self._all.get(digest)
        here = host is not None and host.complete
        return self.rates.seconds("host", size) + (0.0 if here else self.rates.seconds(self._below(digest), size))

    @property
    def used(self) -> int:
        """The bytes in use."""
        return (self.pool.pages.count - self.pool.pages.free) * self.pool.page_size

    def owned(self) -> dict[str, list[HostAdapter]]:
        """Returns every adapter that has pages, by digest. A load that nobody wants any more may be ending while a new
        one runs."""
        by_digest: dict[str, list[HostAdapter]] = {}
        hosts = {id(host): host for host in [*self._all.values(), *self._fetching, *self._leaving]}
        for host in hosts.values():
            if host.pages is not None:
                by_digest.setdefault(host.digest, []).append(host)
        return by_digest

    # --- inside

    def _count(self, digest: str) -> HostAdapter | None:
        host = self._all.get(digest)
        if host is not None:
            host.waiters = self.waiting(digest)
            self._set_priority(host)
            if host.unwanted and not host.complete:
                self.loader.wake()
        return host

    def _set_priority(self, host: HostAdapter) -> None:
        counts = self._waiters.get(host.digest) if self._all.get(host.digest) is host else None
        priority = Priority.REQUEST if host.leased else min(counts, default=host.priority) if counts else host.priority
        if priority == host.priority:
            return
        if priority == Priority.REQUEST and not host.complete:
            host.began = time.monotonic()  # a request takes the prefetch over: the seconds before do not count
        host.priority = priority
        self.loader.wake()

    def _begin(self, digest: str, artifact: str) -> HostAdapter:
        counts = self._waiters.get(digest)
        host = HostAdapter(digest, artifact, waiters=self.waiting(digest))
        host.priority = min(counts) if counts else Priority.REQUEST
        host.prefetched = host.priority > Priority.REQUEST
        host.origin = self._below(digest)
        self._all[digest] = host
        self._measuring.append(host)
        self.loader.measure(host)
        return host

    def _below(self, digest: str) -> HeldTier:
        """Returns the tier from which an adapter would be read that is not in host memory."""
        return "disk" if self.loader.cache is not None and self.loader.cache.has(digest) else "absent"

    def _book_header(self, host: HostAdapter) -> bool:
        """Takes note of a header that was read, or could not be. Returns False while it is being read."""
        if host.state is HostState.READING_HEADER:
            return False
        if host.failed:
            self._record_failure(host)
        else:
            self._unfetched.append(host)
        return True

    def _start_fetches(self) -> None:
        """Starts fetches, the most urgent first. While one waits for room, less urgent ones take none, and give up what
        they have."""
        waiting: list[HostAdapter] = []
        self.short = None
        for host in sorted(self._unfetched, key=lambda host: host.priority):
            if self._all.get(host.digest) is not host or host.size > self.memory:
                continue  # forgotten meanwhile, or will never fit: its request learns that when it is placed
            less_urgent = self.short is not None and host.priority > self.short
            if less_urgent or not self._start_fetch(host):
                self.short = host.priority if self.short is None else self.short
                host.first = None  # it may wait for long
                waiting.append(host)
        self._unfetched = waiting
        if self.short is not None:
            self._reclaim(self.short)

    def _reclaim(self, priority: Priority) -> None:
        """Ends loads that are less urgent than `priority`."""
        for host in self._fetching:
            if host.priority > priority and host.state is not HostState.RECLAIMED:
                self.loader.reclaim(host)
                self.forget(host)
                self.loader.wake()

    def _start_fetch(self, host: HostAdapter) -> bool:
        """Begins to bring the adapter's weights. Returns False when there is no room yet."""
        assert host.layout is not None  # measured
        spared = self._spared.get(host.digest, ()) if host.priority == Priority.PREDICTED else ()
        run = self._make_room(host.size, max(1, host.layout.rows), spared)
        if run is None:
            return False
        host.pages = self.pool.pages.take(host.layout.pages, host.digest)
        assert host.pages is not None  # there is room
        host.slot, host.run = self._free_slots.pop(), run
        self.table.set(host.slot, run, host.layout, host.layout.positions(host.pages))
        self._fetching.append(host)
        self.loader.fetch(host)
        return True

    def _idle(self, spared: Container[str]) -> list[HostAdapter]:
        idle = [host for host in self._all.values() if host.complete and host.unwanted and host.pages is not None]
        return [host for host in idle if host.digest not in spared and host.digest not in self.pinned]

    def _in_order(self, idle: list[HostAdapter]) -> Iterator[HostAdapter]:
        """Yields the idle adapters, the first to leave first. The order is made when that one has to."""
        for digest in self.eviction.order([*map(self._candidate, idle)], time.monotonic()):
            yield self._all[digest]

    def _candidate(self, host: HostAdapter) -> Candidate:
        assert host.pages is not None  # it is idle
        reload_s = self.rates.seconds(self._below(host.digest), host.size)
        if host.digest in self.on_device:
            reload_s *= REPEATED_SHARE
        return Candidate(host.digest, len(host.pages), reload_s, host.arrived)

    def _book_fetch(self, host: HostAdapter) -> bool:
        """Takes note of a fetch that has ended, well or not. Returns False while it runs."""
        if host.failed:
            self._record_failure(host)
            return True
        if host.complete and not host.prefetched:
            self.rates.record_load(host.origin, host.size, host.arrived - host.began)
        return host.complete

    def _free(self, host: HostAdapter) -> None:
        if host.pages is None:
            return
        if host.in_use:
            if host not in self._leaving:
                self._leaving.append(host)
            return
        assert host.layout is not None  # it has pages
        self.table.clear(host.slot, host.run, max(1, host.layout.rows))
        self._free_slots.append(host.slot)
        self.pool.pages.give(host.pages, host.digest)
        host.pages, host.slot, host.run = None, -1, -1

    def _record_failure(self, host: HostAdapter) -> None:
        self._free(host)  # its thread has ended
        if host.state is HostState.FAILED:
            self._failed.append((time.monotonic() + self.failure_memory, host))
        elif host.waiters and self._all.get(host.digest) is host:
            self._begin(host.digest, host.artifact)  # wanted again meanwhile
        else:
            self.forget(host)

    def _make_room(self, size: int, rows: int, spared: Container[str] = ()) -> int | None:
        """Returns a run of `rows` rows of the table once there is room for `size` bytes, too; None when there is not.
        Evicts only if that makes enough room, and where the table's free entries lie too scattered."""
        idle = self._idle(spared)
        if self.used - sum(host.size for host in idle) + size > self.memory or not (idle or self._free_slots):
            return None
        for host in chain([None], self._in_order(idle)):
            if host is not None:
                self.eviction.record_eviction(host.digest)
                self.forget(host)
            if self.used + size <= self.memory and self._free_slots:
                run = self.table.reserve(rows)
                if run is not None:
                    return run
        return None
