"""Room on the device: pages, slots and table entries, which adapters have them, and which ones give theirs up.

Called by the engine's thread alone. An adapter that someone leases, that is pinned, or that a thread still writes, is
never evicted; in which order the others are is up to `eviction`.
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
"""Slot, pages and where the run of table entries begins: what an adapter needs on the device."""


class DeviceRoom:
    def __init__(self, pool: Pool, table: AdapterTable, hosts: HostTier, eviction: LeastRecentlyUsed) -> None:
        """`hosts`: the tier from which an evicted adapter would be brought back."""
        self.pool, self.table, self.hosts, self.eviction = pool, table, hosts, eviction
        self.adapters: OrderedDict[str, DeviceAdapter] = OrderedDict()
        """All that have a place, wholly there or not; the least recently used first."""
        self.pinned: frozenset[str] = frozenset()
        self._free_slots = list(range(table.shape.slots - 1, -1, -1))

    def take(
        self, digest: str, layout: AdapterLayout, evicts: bool = True, spared: Container[str] = ()
    ) -> Place | None:
        """Takes a place for the adapter, evicting idle ones that are not `spared` only where that makes enough room.
        Returns None when it does not. `evicts` False: takes what is free now, or returns None."""
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
                assert pages is not None  # they were free
                return self._free_slots.pop(), pages, run
        return None

    def record_call(self, digest: str) -> None:
        """Notes that a request uses an adapter that has a place."""
        self.adapters.move_to_end(digest)
        self.eviction.demand.record_call(digest, time.monotonic())
        self.eviction.record_call(digest)
        self.hosts.eviction.record_call(digest)

    def give(self, digest: str, layout: AdapterLayout, place: Place) -> None:
        """Gives back the place that the adapter took: it did not move in."""
        slot, pages, run = place
        self.table.give(run, max(1, layout.rows))
        self.pool.pages.give(pages, digest)
        self._free_slots.append(slot)

    def move_in(self, entry: DeviceAdapter) -> None:
        """Gives the adapter its place until it is evicted; the table names it from now on."""
        self.table.set(entry.slot, entry.run, entry.layout, entry.layout.positions(entry.pages))
        self.adapters[entry.host.digest] = entry

    def evict(self, digest: str) -> None:
        """Takes the adapter off the device. The caller has seen that it is idle."""
        entry = self.adapters.pop(digest)
        self.table.clear(entry.slot, entry.run, max(1, entry.layout.rows))
        self.pool.pages.give(entry.pages, digest)
        self._free_slots.append(entry.slot)

    def fits_without(self, layout: AdapterLayout, evicted: Collection[str]) -> bool:
        """Returns whether there would be room for an adapter of this layout if nobody used those that are `evicted`."""
        may_go = [
            entry
            for digest, entry in self.adapters.items()
            if (entry.idle or (digest in evicted and entry.settled)) and digest not in self.pinned
        ]
        if not (may_go or self._free_slots):
            return False
        return layout.pages <= self.pool.pages.free + sum(len(entry.pages) for entry in may_go)

    def choose_spared(self, layout: AdapterLayout, digests: Iterable[str]) -> set[str]:
        """Returns those of `digests` that need not be evicted for an adapter of this layout, the first ones before
        others. Together they have at most half of the pages, and the adapter fits next to them and the pinned
        adapters."""
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
        """Returns the adapters that may be evicted, the first to leave first. Returns None when evicting all of them
        does not make `pages` free, or when there are none and no slot is free."""
        idle = [entry for digest, entry in self.adapters.items() if entry.idle and digest not in self.pinned]
        may_go = [entry for entry in idle if entry.host.digest not in spared]
        if pages > self.pool.pages.free + sum(len(entry.pages) for entry in may_go):
            return None
        return self._in_order(may_go) if may_go or self._free_slots else None

    def _in_order(self, entries: list[DeviceAdapter]) -> Iterator[str]:
        """Yields the entries' digests, the first to leave first. The order is made when the first one has to leave."""
        yield from self.eviction.order([self._candidate(entry) for entry in entries], time.monotonic())

    def _candidate(self, entry: DeviceAdapter) -> Candidate:
        digest = entry.host.digest
        reload_s = self.hosts.reload_seconds(digest, entry.size)
        return Candidate(digest, len(entry.pages), reload_s, entry.copy.arrived, self.hosts.waiting(digest) > 0)
