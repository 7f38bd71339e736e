"""Room on the device: pages, slots and table entries; which adapters have them, and which are evicted.

Only the engine's thread calls it. Adapters that are leased, pinned or still being written are never evicted. `eviction`
decides the order of the others.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator
from itertools import chain

from node_agent.adapter_memory.eviction import Candidate, LeastRecentlyUsed
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import DeviceAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.table import AdapterTable

Place = tuple[int, list[int], int]
"""Place of an adapter on the device: its slot, its pages, and the index of its first table entry."""


class DeviceRoom:
    """Adapters on the device with their pages, slots and table entries."""

    def __init__(self, pool: Pool, table: AdapterTable, hosts: HostTier, eviction: LeastRecentlyUsed) -> None:
        """`hosts`: the tier from which an evicted adapter would be loaded again."""
        self.pool, self.table, self.hosts, self.eviction = pool, table, hosts, eviction
        self.adapters: OrderedDict[str, DeviceAdapter] = OrderedDict()
        """Adapters that have a place on the device, loaded or not, by digest, least recently used first."""
        self.pinned: frozenset[str] = frozenset()
        self._free_slots = list(range(table.shape.slots - 1, -1, -1))

    def allocate(
        self, digest: str, layout: AdapterLayout, evicts: bool = True, spared: Container[str] = ()
    ) -> Place | None:
        """Allocates and returns a place for the adapter. Returns None when there is not enough room.

        Evicts idle adapters that are not `spared`, but only if that makes enough room. With `evicts` False, uses only
        what is free now.
        """
        victims = self._victims(layout.pages, spared) if evicts else iter(())
        if victims is None:
            return None
        for victim in chain([None], victims):
            if victim is not None:
                self.eviction.record_eviction(victim)
                self.evict(victim)
            if not self._free_slots or layout.pages > self.pool.pages.free:
                continue
            run = self.table.reserve(max(1, layout.rows))
            if run is not None:
                pages = self.pool.pages.take(layout.pages, digest)
                assert pages is not None  # enough pages are free
                return self._free_slots.pop(), pages, run
        return None

    def record_call(self, digest: str) -> None:
        """Records a request's use of an adapter that has a place on the device."""
        self.adapters.move_to_end(digest)
        self.eviction.demand.record_call(digest, time.monotonic())
        self.eviction.record_call(digest)
        self.hosts.eviction.record_call(digest)

    def free_unassigned(self, digest: str, layout: AdapterLayout, place: Place) -> None:
        """Frees a place that was allocated for an adapter but not assigned to it by `assign`."""
        slot, pages, run = place
        self.table.give(run, max(1, layout.rows))
        self.pool.pages.give(pages, digest)
        self._free_slots.append(slot)

    def assign(self, entry: DeviceAdapter) -> None:
        """Records that the adapter has the place named in `entry` (slot, pages, table entries) until it is evicted.
        Also writes its table entries."""
        self.table.set(entry.slot, entry.run, entry.layout, entry.layout.positions(entry.pages))
        self.adapters[entry.host.digest] = entry

    def evict(self, digest: str) -> None:
        """Evicts the adapter from the device. The adapter must be idle."""
        entry = self.adapters.pop(digest)
        self.table.clear(entry.slot, entry.run, max(1, entry.layout.rows))
        self.pool.pages.give(entry.pages, digest)
        self._free_slots.append(entry.slot)

    def fits_without(self, layout: AdapterLayout, evicted: Collection[str]) -> bool:
        """Returns whether an adapter of this layout would fit if the adapters in `evicted` were unused."""
        may_go = [
            entry
            for digest, entry in self.adapters.items()
            if (entry.idle or (digest in evicted and entry.settled)) and digest not in self.pinned
        ]
        if not (may_go or self._free_slots):
            return False
        return layout.pages <= self.pool.pages.free + sum(len(entry.pages) for entry in may_go)

    def choose_spared(self, layout: AdapterLayout, digests: Iterable[str]) -> set[str]:
        """Returns those of `digests` that need not be evicted to make room for an adapter of this layout. The first
        digests are preferred.

        Together the returned adapters use at most half of the pages. The new adapter fits next to them and the pinned
        ones.
        """
        all_pages, spared = self.pool.pages.count, set[str]()
        pinned = [entry for digest, entry in self.adapters.items() if digest in self.pinned]
        pages = min(all_pages // 2, all_pages - layout.pages - sum(len(entry.pages) for entry in pinned))
        slots = self.table.shape.slots - 1 - len(pinned)
        for digest in digests:
            if (entry := self.adapters.get(digest)) is None or digest in self.pinned:
                continue
            pages, slots = pages - len(entry.pages), slots - 1
            if pages < 0 or slots < 0:
                break
            spared.add(digest)
        return spared

    def _victims(self, pages: int, spared: Container[str] = ()) -> Iterator[str] | None:
        """Returns the digests that may be evicted, in order of eviction. Returns None when evicting all would not free
        `pages` pages, or when there is neither a candidate nor a free slot."""
        idle = [entry for digest, entry in self.adapters.items() if entry.idle and digest not in self.pinned]
        may_go = [entry for entry in idle if entry.host.digest not in spared]
        if pages > self.pool.pages.free + sum(len(entry.pages) for entry in may_go):
            return None
        return self._in_order(may_go) if may_go or self._free_slots else None

    def _in_order(self, entries: list[DeviceAdapter]) -> Iterator[str]:
        """Yields the entries' digests in order of eviction. The order is computed only when the first one is taken."""
        yield from self.eviction.order([self._candidate(entry) for entry in entries], time.monotonic())

    def _candidate(self, entry: DeviceAdapter) -> Candidate:
        digest = entry.host.digest
        reload_s = self.hosts.reload_seconds(digest, entry.size)
        return Candidate(digest, len(entry.pages), reload_s, entry.copy.arrived, self.hosts.waiting(digest) > 0)
