"""AdapterStore: who may read which adapter on the device, and what is loaded or evicted for it.

Every method is called by the engine's thread alone and none of them blocks; workers only fill memory that was handed
to them. An adapter that someone leases, or that a worker still writes, is never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adapters.base_model import BaseModel
from adapters.store import ObjectStore
from cluster.messages import Adapter, Resident
from node_agent.adapter_memory.layout import row_units
from node_agent.adapter_memory.link import Link
from node_agent.adapter_memory.loader import CopyStates, HostAdapter, Loader
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.table import AdapterTable
from node_agent.adapter_memory.weights import AdapterWeights, view_weights
from node_agent.config import EngineConfig
from node_agent.device import Event
from node_agent.types import LayerState, Lease, LoadFailed, NoRoom, Pending, TooLarge


@dataclass
class DeviceAdapter:
    """One adapter that has room on the device."""

    host: HostAdapter
    slot: int
    start: int
    run: int
    copy: CopyStates
    leases: int = 0
    copying: bool = False
    weights: AdapterWeights | None = None
    """Set when the adapter is wholly there and the table names it."""

    @property
    def size(self) -> int:
        return self.host.size


class AdapterStore:
    """Two least-recently-used tiers: `host_memory` bytes of host memory, `adapter_memory` bytes on the device."""

    def __init__(
        self,
        config: EngineConfig,
        store: ObjectStore,
        base: BaseModel,
        device: torch.device,
        dtype: torch.dtype,
        on_change: Callable[[], None],
    ) -> None:
        self.base = base
        self.pool = Pool(config.adapter_memory, device, dtype)
        narrowest = min(row_units(width, dtype.itemsize) for pair in base.widths for width in pair)
        self.table = AdapterTable(config.adapter_slots, self.pool.units // narrowest, base, device, dtype.itemsize)
        self.loader = Loader(store, base, dtype, Link(config.store_link), Link(config.load_link), on_change)
        self.host_memory = config.host_memory
        self._host: OrderedDict[str, HostAdapter] = OrderedDict()
        self._unfetched: list[HostAdapter] = []
        self._device: OrderedDict[str, DeviceAdapter] = OrderedDict()
        self._free_slots = list(range(config.adapter_slots - 1, -1, -1))
        self._loading: list[DeviceAdapter] = []
        """Those of `_device` that are not switched in yet."""
        self._releasing: list[tuple[str, Sequence[Event]]] = []

    # --- what the engine calls for a request

    def announce(self, adapter: Adapter) -> str:
        """Start to bring the adapter to host memory; returns where it is now: none (device), host or absent."""
        entry = self._device.get(adapter.digest)
        if entry is not None and entry.weights is not None:
            return "none"
        host = self._host.get(adapter.digest)
        if host is not None and not host.failed:
            self._host.move_to_end(adapter.digest)
            return "host" if host.complete else "absent"
        host = HostAdapter(adapter.digest, adapter.artifact)
        self._host[adapter.digest] = host
        self._unfetched.append(host)
        self.loader.measure(host)
        return "absent"

    def acquire(self, adapter: Adapter) -> Lease | NoRoom | Pending | TooLarge | LoadFailed:
        """A lease on the adapter's slot, whose load goes on if it is not there yet; or why not (now, or ever)."""
        entry = self._device.get(adapter.digest)
        if entry is None:
            found = self._place(adapter)
            if not isinstance(found, DeviceAdapter):
                return found
            entry = found
        elif entry.copy.failed:
            return LoadFailed(entry.copy.failed)
        entry.leases += 1
        self._device.move_to_end(adapter.digest)
        return Lease(adapter.digest, entry.slot, adapter.ranks)

    def on_device(self, digest: str) -> bool:
        """The adapter has room on the device: a lease on it needs no more."""
        return digest in self._device

    def release(self, lease: Lease, after: Sequence[Event]) -> None:
        """The lease ends when every event in `after` has."""
        waiting = [event for event in after if not event.query()]
        if waiting:
            self._releasing.append((lease.digest, waiting))
        else:
            self._drop_lease(lease.digest)

    def state(self, lease: Lease, layer: int) -> int:
        """A LayerState."""
        entry = self._device[lease.digest]
        if entry.copy.failed:
            return LayerState.FAILED
        if layer < entry.copy.arrived:
            return LayerState.DEVICE
        return LayerState.HOST if layer < entry.host.ready else LayerState.NO

    def loaded(self, lease: Lease) -> bool:
        """The whole adapter is on the device and the table names it."""
        return self._device[lease.digest].weights is not None

    def failure(self, lease: Lease) -> str:
        """Why the load failed, or an empty string."""
        return self._device[lease.digest].copy.failed

    def weights(self, slot_lease: Lease) -> AdapterWeights:
        found = self._device[slot_lease.digest].weights
        if found is None:
            raise RuntimeError(f"adapter {slot_lease.digest} is read before it is on the device")
        return found

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
        self._start_fetches()
        self._loading = [entry for entry in self._loading if not self._advance_load(entry)]

    def close(self) -> None:
        self.loader.close()

    # --- reports

    def residents(self) -> list[Resident]:
        on_device = [
            Resident(digest, "device", entry.size, entry.leases)
            for digest, entry in self._device.items()
            if entry.weights is not None
        ]
        return on_device + [
            Resident(digest, "host", host.size, 0)
            for digest, host in self._host.items()
            if host.complete and digest not in self._device
        ]

    @property
    def free_bytes(self) -> int:
        """Bytes that a new adapter could have: free, or held by adapters that nobody leases."""
        return self.pool.free_bytes + sum(e.size for e in self._device.values() if self._idle(e))

    @property
    def leases(self) -> int:
        return sum(entry.leases for entry in self._device.values())

    # --- inside

    def _place(self, adapter: Adapter) -> DeviceAdapter | NoRoom | Pending | TooLarge | LoadFailed:
        """Room on the device for an adapter that has none, and the start of its copy."""
        host = self._host.get(adapter.digest)
        if host is not None and host.failed:
            del self._host[adapter.digest]  # the next request tries again
            return LoadFailed(host.failed)
        if host is None:
            self.announce(adapter)
            return Pending()
        if host.layout is None:
            return Pending()
        limit = min(self.pool.size, self.host_memory)
        if host.size > limit:
            return TooLarge(host.size, limit)
        if host in self._unfetched:
            return Pending()  # host memory is full of loads; this one is next in line
        room = self._make_room(host)
        if room is None:
            return NoRoom()
        start, run = room
        entry = DeviceAdapter(host, self._free_slots.pop(), start, run, CopyStates())
        self._device[adapter.digest] = entry
        self._loading.append(entry)
        return entry

    def _make_room(self, host: HostAdapter) -> tuple[int, int] | None:
        """(pool unit, table entry), evicting idle adapters, least recently used first. None: not even then."""
        assert host.layout is not None  # measured before it is placed
        if host.size > self.free_bytes:
            return None
        while True:
            start = self.pool.allocate(host.size) if self._free_slots else None
            if start is not None:
                run = self.table.reserve(max(1, host.layout.rows))
                if run is not None:
                    return start, run
                self.pool.release(start)
            victim = next((d for d, e in self._device.items() if self._idle(e)), None)
            if victim is None:
                return None
            self._evict(victim)

    def _idle(self, entry: DeviceAdapter) -> bool:
        return entry.leases == 0 and entry.copy.ended.is_set()

    def _evict(self, digest: str) -> None:
        entry = self._device.pop(digest)
        assert entry.host.layout is not None  # it had room
        self.table.clear(entry.slot, entry.run, max(1, entry.host.layout.rows))
        self.pool.release(entry.start)
        self._free_slots.append(entry.slot)

    def _drop_lease(self, digest: str) -> None:
        entry = self._device[digest]
        if entry.leases <= 0:
            raise RuntimeError(f"a lease on {digest} was released twice")
        entry.leases -= 1
        if entry.copy.failed and self._idle(entry):
            self._evict(digest)

    def _advance_load(self, entry: DeviceAdapter) -> bool:
        """Start or end an adapter's copy as is due; True when the load is over, one way or the other.

        A copy starts when the whole adapter is in host memory: a worker that waited for a slow store would hold up
        the copies of others.
        """
        host, copy = entry.host, entry.copy
        if not entry.copying:
            if host.failed:
                copy.failed = host.failed
                copy.ended.set()
            elif host.complete:
                assert host.layout is not None
                entry.copying = True
                end = entry.start + host.layout.layer_start[-1]
                self.loader.copy(host, self.pool.elements(entry.start, end), copy)
        if not copy.ended.is_set():
            return False
        if copy.failed:
            self._host.pop(host.digest, None)  # whatever failed, the next request reads the store again
            if entry.leases == 0:
                self._evict(host.digest)
        else:
            assert host.layout is not None
            self.table.set(entry.slot, entry.run, entry.start, host.layout)
            entry.weights = view_weights(self.pool, entry.start, host.layout, self.base)
        return True

    def _start_fetches(self) -> None:
        """Fetch measured adapters in order of announcement while host memory has room for them."""
        waiting: list[HostAdapter] = []
        for host in self._unfetched:
            if host.failed or host.size > self.host_memory:
                continue
            if host.layout is None or not self._make_host_room(host.size):
                waiting.append(host)
                continue
            host.data = torch.empty(host.size // self.pool.data.element_size(), dtype=self.pool.data.dtype)
            self.loader.fetch(host)
        self._unfetched = waiting

    def _make_host_room(self, size: int) -> bool:
        used = sum(h.size for h in self._host.values() if h.data is not None)
        for digest, host in list(self._host.items()):
            if used + size <= self.host_memory:
                break
            entry = self._device.get(digest)
            if host.complete and (entry is None or entry.copy.ended.is_set()):
                del self._host[digest]
                host.data = None  # an adapter on the device keeps its HostAdapter, but not these bytes
                used -= host.size
        return used + size <= self.host_memory
