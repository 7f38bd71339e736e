"""Room on the device: pages, slots and table entries, which adapters have them, and which ones give theirs up.

Called by the engine's thread alone. An adapter that someone leases, that is pinned, or that a thread still writes, is
never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import chain

from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import DeviceAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.table import AdapterTable

Place = tuple[int, list[int], int]
"""Slot, pages and where the run of table entries begins: what an adapter needs on the device."""


def least_recently_used(candidates: Sequence[str]) -> str:
    return candidates[0]


class DeviceRoom:
    def __init__(self, pool: Pool, table: AdapterTable) -> None:
        self.pool, self.table = pool, table
        self.choose_victim: Callable[[Sequence[str]], str] = least_recently_used
        """Gets the digests that may be evicted, the least recently used first, and returns one of them."""
        self.adapters: OrderedDict[str, DeviceAdapter] = OrderedDict()
        """All that have a place, wholly there or not; the least recently used first."""
        self.pinned: set[str] = set()
        self._free_slots = list(range(table.shape.slots - 1, -1, -1))

    def take(
        self, digest: str, layout: AdapterLayout, evicts: bool = True, spared: Container[str] = ()
    ) -> Place | None:
        """A place for the adapter, evicting idle ones that are not `spared` only where that makes enough room; None: it
        does not. `evicts` False: what is free now, or None."""
        victims = self._victims(layout.pages, spared) if evicts else iter(())
        if victims is None:
            return None
        for victim in chain([None], victims):
            if victim is not None:
                self.evict(victim)
            if not self._free_slots or layout.pages > self.pool.pages.free:
                continue
            run = self.table.reserve(max(1, layout.rows))
            if run is not None:
                pages = self.pool.pages.take(layout.pages, digest)
                assert pages is not None  # so many were free
                return self._free_slots.pop(), pages, run
        return None

    def give(self, digest: str, layout: AdapterLayout, place: Place) -> None:
        """The place that the adapter took is not needed: it did not move in."""
        slot, pages, run = place
        self.table.give(run, max(1, layout.rows))
        self.pool.pages.give(pages, digest)
        self._free_slots.append(slot)

    def move_in(self, entry: DeviceAdapter) -> None:
        """The adapter has its place until it is evicted, and the table names it from now on."""
        self.table.set(entry.slot, entry.run, entry.layout, entry.layout.positions(entry.pages))
        self.adapters[entry.host.digest] = entry

    def evict(self, digest: str) -> None:
        """The caller has seen that it is idle."""
        entry = self.adapters.pop(digest)
        self.table.clear(entry.slot, entry.run, max(1, entry.layout.rows))
        self.pool.pages.give(entry.pages, digest)
        self._free_slots.append(entry.slot)

    def fits_without(self, layout: AdapterLayout, others: Collection[str]) -> bool:
        """There would be room for an adapter if nobody used the others."""
        may_go = [
            entry
            for digest, entry in self.adapters.items()
            if (entry.idle or (digest in others and entry.settled)) and digest not in self.pinned
        ]
        if not (may_go or self._free_slots):
            return False
        return layout.pages <= self.pool.pages.free + sum(len(entry.pages) for entry in may_go)

    def _victims(self, pages: int, spared: Container[str] = ()) -> Iterator[str] | None:
        """Returns the adapters that may be evicted, in the order of `choose_victim`. Returns None when evicting all of
        them does not make `pages` free, or when there are none and no slot is free."""
        idle = [digest for digest, entry in self.adapters.items() if entry.idle and digest not in self.pinned]
        may_go = [digest for digest in idle if digest not in spared]
        if pages > self.pool.pages.free + sum(len(self.adapters[digest].pages) for digest in may_go):
            return None
        return self._in_order(may_go) if may_go or self._free_slots else None

    def _in_order(self, digests: list[str]) -> Iterator[str]:
        while digests:
            chosen = self.choose_victim(digests)
            digests.remove(chosen)
            yield chosen
