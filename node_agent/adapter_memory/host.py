"""The host tier: adapters that are in host memory or are being read from the object store or the disk.

Only the engine's thread calls it. Loader threads fill `pages` and set bits of `here`. A load runs while something waits
for it (`announce` adds a waiter, `retract` removes one), a copy to the device reads it, or a CPU worker does. A copy or
worker keeps the adapter's pages and table entry even if the load fails. A load has the priority of its most urgent
waiter. If it finds no room, less urgent loads give theirs up.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain

from cluster.messages import Adapter
from cluster.residency import HeldTier
from node_agent.adapter_memory.disk_cache import tier_below
from node_agent.adapter_memory.eviction import Candidate, LeastRecentlyUsed
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.load_rates import LoadRates
from node_agent.adapter_memory.loader import Loader
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.table import AdapterTable
from node_agent.adapter_memory.waiters import Waiters
from node_agent.states import HostState

FAILURE_MEMORY = 1.0
"""Seconds for which a failed load stays recorded. Requests in this time fail with it; later ones start a new load."""

REPEATED_SHARE = 0.2
"""Factor by which an adapter's eviction score in host memory is lowered while it is also on the device. Its host copy
is then read only if it leaves the device before its next call. Tuned on one half of the traces of
benchmarks/adapter_memory/eviction.py."""


class HostTier:
    """Adapters in host memory, at most `memory` bytes. `eviction` chooses which adapter leaves first. Adapters with
    waiters, copies or holds stay."""

    def __init__(
        self, loader: Loader, pool: Pool, table: AdapterTable, *, memory: int, eviction: LeastRecentlyUsed
    ) -> None:
        """`table` holds the positions of the adapters' rows in `pool`, for CPU workers."""
        self.loader, self.pool, self.table, self.memory = loader, pool, table, memory
        self._free_slots = list(range(table.shape.slots - 1, -1, -1))
        self.failure_memory = FAILURE_MEMORY
        self.eviction, self.rates = eviction, LoadRates()
        self.pinned: frozenset[str] = frozenset()
        """digests of adapters that are not evicted once loaded"""
        self.on_device: Container[str] = ()
        """digests of adapters with pages on the device"""
        self.short: Priority | None = None
        """priority of the most urgent load that found no room at the last `poll`; None if all found room"""
        self._waiters = Waiters()
        self._spared: dict[str, Container[str]] = {}
        self._all: OrderedDict[str, HostAdapter] = OrderedDict()
        self._measuring: list[HostAdapter] = []
        self._unfetched: list[HostAdapter] = []
        self._fetching: list[HostAdapter] = []
        self._failed: deque[tuple[float, HostAdapter]] = deque()
        self._leaving: list[HostAdapter] = []
        """dropped adapters whose pages are still in use"""

    def get(self, digest: str) -> HostAdapter | None:
        return self._all.get(digest)

    def all(self) -> Iterable[HostAdapter]:
        """Returns all adapters of the host tier, including those still loading and those that failed recently."""
        return self._all.values()

    def lacks_room(self, digest: str) -> bool:
        """Returns whether the adapter's load waits for room in host memory. Its header has then been read."""
        return any(host.digest == digest for host in self._unfetched)

    def waiting(self, digest: str) -> int:
        """Returns the number of requests and prefetches that wait for the adapter."""
        return self._waiters.count(digest)

    def announce(
        self, digest: str, priority: Priority = Priority.REQUEST, spared: Container[str] = (), tenant: str = ""
    ) -> None:
        """Adds a waiter for the adapter; the caller removes it with one `retract`. `spared`: digests that a predicted
        prefetch must not evict. `tenant`: for whom the adapter is loaded; empty for no tenant."""
        self._waiters.add(digest, priority, tenant)
        if priority == Priority.PREDICTED:
            self._spared[digest] = spared
        self._count(digest)

    def retract(self, digest: str, priority: Priority = Priority.REQUEST) -> None:
        """Removes a waiter. An adapter that nobody wants any more is dropped if its fetch has not begun."""
        self._waiters.remove(digest, priority)
        if priority == Priority.PREDICTED and not self._waiters.has(digest, priority):
            del self._spared[digest]
        host = self._count(digest)
        if host is not None and host.unwanted and not host.complete and host not in self._fetching:
            self.forget(host)  # the thread of a running fetch checks this itself

    def load(self, adapter: Adapter) -> HostAdapter:
        """Returns the adapter. Starts its load unless it is running, complete, or failed within `failure_memory`."""
        host = self._all.get(adapter.digest)
        if host is None or host.state is HostState.ABANDONED:
            host = self._begin(adapter.digest, adapter.artifact)
        self._all.move_to_end(adapter.digest)
        return host

    def poll(self) -> None:
        """Processes the results of loader threads, then starts the fetches that now have room. The most urgent go
        first, then the oldest."""
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
        """Yields the adapters that are completely in host memory."""
        return (host for host in self._all.values() if host.complete)

    def forget(self, host: HostAdapter) -> None:
        """Removes the adapter from the host tier. Its pages are freed once nothing reads or writes them."""
        if self._all.get(host.digest) is host:
            del self._all[host.digest]
            host.waiters = 0  # its waiters wait for the next load: this one may end
            if not host.complete:
                self.loader.wake()  # other loads waited for this one
        self._free(host)  # a DeviceAdapter keeps this HostAdapter, but not its pages

    def drop(self, digest: str) -> None:
        """Removes the adapter from the host tier, if it is there. Its pages are freed once nothing reads or writes
        them."""
        host = self._all.get(digest)
        if host is not None:
            self.forget(host)

    def hold(self, host: HostAdapter) -> bool:
        """Keeps the adapter's pages and table entry until `let_go`. Returns False when it has no pages, has failed, or
        was dropped."""
        if host.pages is None or host.failed or self._all.get(host.digest) is not host:
            return False
        host.holds += 1
        return True

    def let_go(self, host: HostAdapter) -> None:
        """Ends one hold on the adapter. Raises RuntimeError if there is none."""
        if host.holds <= 0:
            raise RuntimeError(f"a hold on {host.digest} was released twice")
        host.holds -= 1

    def lend(self, digest: str, layout: AdapterLayout) -> HostAdapter | None:
        """Allocates an adapter of zeros for measurements, and holds it. May evict idle adapters. Returns None when
        there is no room.

        `let_go` and then `forget` free it.
        """
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
        """Records whether any request leases the adapter on the device."""
        host.leased = leased
        self._set_priority(host)

    def awaited(self) -> Iterator[str]:
        """Yields the digests that requests or operators' prefetches wait for. Predicted prefetches are left out."""
        return self._waiters.awaited()

    def bytes_awaited(self, elsewhere: Container[str]) -> int:
        """Returns the total bytes of the `awaited` adapters. Leaves out digests in `elsewhere`, failed loads, and loads
        without a header yet."""
        hosts = (self._all.get(digest) for digest in self.awaited() if digest not in elsewhere)
        return sum(
            host.layout.live for host in hosts if host is not None and host.layout is not None and not host.failed
        )

    def reload_seconds(self, digest: str, size: int) -> float:
        """Returns the expected seconds to load the adapter again after it leaves the device."""
        host = self._all.get(digest)
        here = host is not None and host.complete
        return self.rates.seconds("host", size) + (0.0 if here else self.rates.seconds(self._below(digest), size))

    @property
    def used(self) -> int:
        """Bytes of the pool's pages in use."""
        return (self.pool.pages.count - self.pool.pages.free) * self.pool.page_size

    def owned(self) -> dict[str, list[HostAdapter]]:
        """Returns the adapters that have pages, by digest. A digest has several while an abandoned load ends and a new
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
            if host.waiters:
                host.tenant = self._waiters.last_tenant(digest)
            self._set_priority(host)
            if host.unwanted and not host.complete:
                self.loader.wake()
        return host

    def _set_priority(self, host: HostAdapter) -> None:
        waits = self._waiters.first_priority(host.digest) if self._all.get(host.digest) is host else None
        priority = Priority.REQUEST if host.leased else waits
        if priority is None or priority == host.priority:
            return
        if priority == Priority.REQUEST and not host.complete:
            host.began = time.monotonic()  # a request takes over the prefetch: its load time counts from now on
        host.priority = priority
        self.loader.wake()

    def _begin(self, digest: str, artifact: str) -> HostAdapter:
        host = HostAdapter(digest, artifact, waiters=self.waiting(digest), tenant=self._waiters.last_tenant(digest))
        waits = self._waiters.first_priority(digest)
        host.priority = Priority.REQUEST if waits is None else waits
        host.prefetched = host.priority > Priority.REQUEST
        host.origin = self._below(digest)
        self._all[digest] = host
        self._measuring.append(host)
        self.loader.measure(host)
        return host

    def _below(self, digest: str) -> HeldTier:
        """Returns the tier to read an adapter from that is not in host memory."""
        return tier_below(self.loader.cache, digest)

    def _book_header(self, host: HostAdapter) -> bool:
        """Processes the result of reading a header. Returns False while it is still being read."""
        if host.state is HostState.READING_HEADER:
            return False
        if host.failed:
            self._record_failure(host)
        else:
            self._unfetched.append(host)
        return True

    def _start_fetches(self) -> None:
        """Starts fetches, the most urgent first. While one waits for room, less urgent ones are not started, and
        running ones are reclaimed."""
        waiting: list[HostAdapter] = []
        self.short = None
        for host in self._in_turn(self._unfetched):
            if self._all.get(host.digest) is not host or host.size > self.memory:
                continue  # dropped meanwhile, or larger than the tier: the request fails when it is placed
            less_urgent = self.short is not None and host.priority > self.short
            if less_urgent or not self._start_fetch(host):
                self.short = host.priority if self.short is None else self.short
                host.first = None  # drops the bytes, since the wait may be long
                waiting.append(host)
        self._unfetched = waiting
        if self.short is not None:
            self._reclaim(self.short)

    def _in_turn(self, hosts: Iterable[HostAdapter]) -> list[HostAdapter]:
        """Returns the adapters in the order in which their fetches start: the most urgent first, then those of the
        tenant with the fewest fetches, then the oldest."""
        fetches, keys = Counter(host.tenant for host in self._fetching), list[tuple[Priority, int]]()
        ordered = list(hosts)
        for host in ordered:
            keys.append((host.priority, fetches[host.tenant]))
            fetches[host.tenant] += 1
        turns = sorted(range(len(ordered)), key=keys.__getitem__)
        return [ordered[index] for index in turns]

    def _reclaim(self, priority: Priority) -> None:
        """Reclaims the running fetches that are less urgent than `priority`."""
        for host in self._fetching:
            if host.priority > priority and host.state is not HostState.RECLAIMED:
                self.loader.reclaim(host)
                self.forget(host)
                self.loader.wake()

    def _start_fetch(self, host: HostAdapter) -> bool:
        """Starts to read the adapter's weights. Returns False when there is no room yet."""
        assert host.layout is not None  # its header was read
        spared = self._spared.get(host.digest, ()) if host.priority == Priority.PREDICTED else ()
        run = self._make_room(host.size, max(1, host.layout.rows), spared)
        if run is None:
            return False
        host.pages = self.pool.pages.take(host.layout.pages, host.digest)
        assert host.pages is not None  # _make_room made room
        host.slot, host.run = self._free_slots.pop(), run
        self.table.set(host.slot, run, host.layout, host.layout.positions(host.pages))
        self._fetching.append(host)
        self.loader.fetch(host)
        return True

    def _idle(self, spared: Container[str]) -> list[HostAdapter]:
        idle = [host for host in self._all.values() if host.complete and host.unwanted and host.pages is not None]
        return [host for host in idle if host.digest not in spared and host.digest not in self.pinned]

    def _in_order(self, idle: list[HostAdapter]) -> Iterator[HostAdapter]:
        """Yields the idle adapters in the order in which to evict them. The order is computed only when the first one
        is taken."""
        for digest in self.eviction.order([*map(self._candidate, idle)], time.monotonic()):
            yield self._all[digest]

    def _candidate(self, host: HostAdapter) -> Candidate:
        assert host.pages is not None  # idle adapters have pages
        reload_s = self.rates.seconds(self._below(host.digest), host.size)
        if host.digest in self.on_device:
            reload_s *= REPEATED_SHARE
        return Candidate(host.digest, len(host.pages), reload_s, host.arrived)

    def _book_fetch(self, host: HostAdapter) -> bool:
        """Processes a fetch that has ended, successfully or not. Returns False while it runs."""
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
        assert host.layout is not None  # an adapter with pages has a layout
        self.table.clear(host.slot, host.run, max(1, host.layout.rows))
        self._free_slots.append(host.slot)
        self.pool.pages.give(host.pages, host.digest)
        host.pages, host.slot, host.run = None, -1, -1

    def _record_failure(self, host: HostAdapter) -> None:
        self._free(host)  # no thread fills its pages any more
        if host.state is HostState.FAILED:
            self._failed.append((time.monotonic() + self.failure_memory, host))
        elif host.waiters and self._all.get(host.digest) is host:
            self._begin(host.digest, host.artifact)  # requested again meanwhile
        else:
            self.forget(host)

    def _make_room(self, size: int, rows: int, spared: Container[str] = ()) -> int | None:
        """Makes room for an adapter in host memory: `size` bytes of the pool and `rows` consecutive table rows. Returns
        the index of the first of these rows; None when there is no room.

        Evicts idle adapters, but only if that suffices. It also evicts them when the table's free rows are too
        fragmented.
        """
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
