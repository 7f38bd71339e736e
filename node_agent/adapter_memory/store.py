"""AdapterStore: who may read which adapter on the device, and what is loaded or evicted for it.

Every method is called by the engine's thread alone and none of them blocks; workers only fill pages that were handed
to them. An adapter that someone leases, that is pinned, or that a worker still writes, is never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adapters.base_model import BaseModel
from adapters.store import ObjectStore
from cluster.messages import Adapter, Resident
from node_agent.adapter_memory.host_memory import HostMemory
from node_agent.adapter_memory.host_tier import HostTier
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.link import Link
from node_agent.adapter_memory.loader import CopyStates, HostAdapter, Loader
from node_agent.adapter_memory.pages import choose_page_size
from node_agent.adapter_memory.pool import device_pool
from node_agent.adapter_memory.table import AdapterTable, rows_for
from node_agent.adapter_memory.weights import AdapterWeights
from node_agent.config import EngineConfig
from node_agent.device import Event
from node_agent.types import LayerState, Lease, LoadFailed, NoRoom, Pending, TooLarge


@dataclass
class DeviceAdapter:
    """One adapter that has room on the device."""

    host: HostAdapter
    layout: AdapterLayout
    slot: int
    pages: list[int]
    run: int
    copy: CopyStates
    leases: int = 0
    weights: AdapterWeights | None = None
    """Set when the adapter is wholly there and the table names it."""

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def idle(self) -> bool:
        """Nobody reads or writes it."""
        return self.leases == 0 and self.copy.ended.is_set()


def least_recently_used(candidates: Sequence[str]) -> str:
    return candidates[0]


class AdapterStore:
    """Two tiers of pages: `host_memory` bytes of host memory, `adapter_memory` bytes on the device."""

    def __init__(
        self,
        config: EngineConfig,
        store: ObjectStore,
        base: BaseModel,
        device: torch.device,
        dtype: torch.dtype,
        on_change: Callable[[], None],
        choose_victim: Callable[[Sequence[str]], str] = least_recently_used,
    ) -> None:
        """`choose_victim` gets the digests that may be evicted, least recently used first, and returns one of them."""
        self.base = base
        page_size = choose_page_size(base, dtype.itemsize)
        self.pool = device_pool(config.adapter_memory, page_size, device, dtype)
        self.host_memory = HostMemory(config.host_memory, page_size, dtype, pinned=device.type == "cuda")
        rows = rows_for(self.pool.pages.count * self.pool.page_units, base, dtype.itemsize)
        self.table = AdapterTable(config.adapter_slots, rows, base.num_layers, device)
        links = Link(config.store_link), Link(config.load_link)
        self.loader = Loader(store, base, self.host_memory.pool, self.pool, *links, on_change)
        self.host = HostTier(self.host_memory.pool, self.loader)
        self.limit = min(config.adapter_memory, config.host_memory)
        self.choose_victim = choose_victim
        self.device: OrderedDict[str, DeviceAdapter] = OrderedDict()
        self.pinned: set[str] = set()
        self._arriving: set[str] = set()
        self._free_slots = list(range(config.adapter_slots - 1, -1, -1))
        self._releasing: list[tuple[str, Sequence[Event]]] = []

    # --- what the engine calls for a request

    def announce(self, adapter: Adapter) -> str:
        """Start to bring the adapter to host memory; returns where it is now: none (device), host or absent."""
        entry = self.device.get(adapter.digest)
        if entry is not None and entry.weights is not None:
            return "none"
        return "host" if self.host.announce(adapter).complete else "absent"

    def acquire(self, adapter: Adapter) -> Lease | NoRoom | Pending | TooLarge | LoadFailed:
        """A lease on the adapter's slot, whose load goes on if it is not there yet; or why not (now, or ever)."""
        entry = self.device.get(adapter.digest)
        if entry is None:
            found = self._place(adapter)
            if not isinstance(found, DeviceAdapter):
                return found
            entry = found
        elif entry.copy.failed:
            return LoadFailed(entry.copy.failed)
        entry.leases += 1
        self.device.move_to_end(adapter.digest)
        return Lease(adapter.digest, entry.slot, adapter.ranks)

    def on_device(self, digest: str) -> bool:
        """The adapter has room on the device: a lease on it needs no more."""
        return digest in self.device

    def release(self, lease: Lease, after: Sequence[Event]) -> None:
        """The lease ends when every event in `after` has."""
        waiting = [event for event in after if not event.query()]
        if waiting:
            self._releasing.append((lease.digest, waiting))
        else:
            self._drop_lease(lease.digest)

    def state(self, lease: Lease, layer: int) -> int:
        """A LayerState."""
        entry = self.device[lease.digest]
        if entry.copy.failed:
            return LayerState.FAILED
        if layer < entry.copy.arrived:
            return LayerState.DEVICE
        return LayerState.HOST if layer < entry.host.ready else LayerState.NO

    def loaded(self, lease: Lease) -> bool:
        """The whole adapter is on the device and the table names it."""
        return self.device[lease.digest].weights is not None

    def failure(self, lease: Lease) -> str:
        """Why the load failed, or an empty string."""
        return self.device[lease.digest].copy.failed

    def weights(self, slot_lease: Lease) -> AdapterWeights:
        found = self.device[slot_lease.digest].weights
        if found is None:
            raise RuntimeError(f"adapter {slot_lease.digest} is read before it is on the device")
        return found

    def pin(self, digest: str) -> None:
        """Once on the device, the adapter stays there until it is unpinned."""
        self.pinned.add(digest)

    def unpin(self, digest: str) -> None:
        self.pinned.discard(digest)

    def discard(self, digest: str) -> bool:
        """Take an adapter off the device that nobody uses, pinned or not; False when somebody does."""
        entry = self.device.get(digest)
        if entry is None or not entry.idle:
            return False
        self._evict(digest)
        return True

    # --- what the engine calls once per iteration

    def poll(self) -> None:
        """Switch in what has arrived, end releases whose events have ended, and start fetches that now have room."""
        still: list[tuple[str, Sequence[Event]]] = []
        for digest, events in self._releasing:
            waiting = [event for event in events if not event.query()]
            if waiting:
                still.append((digest, waiting))
            else:
                self._drop_lease(digest)
        self._releasing = still
        for digest in list(self._arriving):
            if self.device[digest].copy.ended.is_set():
                self._arriving.discard(digest)
                self._switch_in(digest, self.device[digest])
        self.host.poll()

    def close(self) -> None:
        self.loader.close()
        self.host_memory.close()

    # --- reports

    def residents(self) -> list[Resident]:
        on_device = [
            Resident(digest, "device", entry.size, entry.leases)
            for digest, entry in self.device.items()
            if entry.weights is not None
        ]
        return on_device + [
            Resident(host.digest, "host", host.size, 0)
            for host in self.host
            if host.complete and host.digest not in self.device
        ]

    @property
    def free_bytes(self) -> int:
        """Bytes that a new adapter could have: free, or held by adapters that may be evicted."""
        return self.pool.free_bytes + sum(self.device[digest].size for digest in self._evictable())

    @property
    def leases(self) -> int:
        return sum(entry.leases for entry in self.device.values())

    # --- inside

    def _place(self, adapter: Adapter) -> DeviceAdapter | NoRoom | Pending | TooLarge | LoadFailed:
        """Room on the device for an adapter that has none, and the start of its copy."""
        host = self.host.find(adapter.digest)
        if host is not None and host.failed:
            self.host.drop(host)  # the next request tries again
            return LoadFailed(host.failed)
        if host is None:
            self.host.announce(adapter)
            return Pending()
        if host.layout is None:
            return Pending()
        if host.size > min(self.pool.size, self.host.pool.size):
            return TooLarge(host.size, self.limit)
        if self.host.waits(host):
            return Pending()  # host memory is full of loads; this one is next in line
        room = self._make_room(adapter.digest, host.layout)
        if room is None:
            return NoRoom()
        pages, run = room
        entry = DeviceAdapter(host, host.layout, self._free_slots.pop(), pages, run, CopyStates())
        self.device[adapter.digest] = entry
        self._arriving.add(adapter.digest)
        self.loader.copy(host, pages, entry.copy)
        return entry

    def _make_room(self, digest: str, layout: AdapterLayout) -> tuple[list[int], int] | None:
        """(pages, table entry), evicting adapters that nobody uses. None, and nothing evicted: not even then."""
        candidates = self._evictable()
        held = sum(len(self.device[d].pages) for d in candidates)
        if layout.pages > self.pool.pages.free + held or not (self._free_slots or candidates):
            return None
        while True:
            if self._free_slots and layout.pages <= self.pool.pages.free:
                run = self.table.reserve(max(1, layout.rows))
                if run is not None:
                    pages = self.pool.pages.take(layout.pages, digest)
                    assert pages is not None  # so many were free
                    return pages, run
            if not candidates:
                return None
            victim = self.choose_victim(candidates)
            candidates.remove(victim)
            self._evict(victim)

    def _evictable(self) -> list[str]:
        """Least recently used first."""
        return [d for d, entry in self.device.items() if entry.idle and d not in self.pinned]

    def _evict(self, digest: str) -> None:
        entry = self.device.pop(digest)
        self._arriving.discard(digest)
        self.table.clear(entry.slot, entry.run, max(1, entry.layout.rows))
        self.pool.pages.give(entry.pages, digest)
        self._free_slots.append(entry.slot)

    def _drop_lease(self, digest: str) -> None:
        entry = self.device[digest]
        if entry.leases <= 0:
            raise RuntimeError(f"a lease on {digest} was released twice")
        entry.leases -= 1
        if entry.copy.failed and entry.idle:
            self.host.drop(entry.host)
            self._evict(digest)

    def _switch_in(self, digest: str, entry: DeviceAdapter) -> None:
        if entry.copy.failed:
            self.host.drop(entry.host)  # whatever failed, the next request reads the store again
            if entry.leases == 0:
                self._evict(digest)
            return
        assert entry.copy.positions is not None  # it was copied
        self.table.set(entry.slot, entry.run, entry.layout, entry.copy.positions)
        entry.weights = entry.copy.views
