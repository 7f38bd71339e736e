"""AdapterStore: who may read which adapter on the device, and what is loaded or evicted for it.

Every method is called by the engine's thread alone and none of them blocks; workers only fill memory that was handed
to them. An adapter that someone leases, or that a worker still writes, is never evicted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adapters.base_model import BaseModel
from adapters.store import ObjectStore
from cluster.messages import Adapter, Resident
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.layout import ROW_ALIGN, row_units
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
    began: float
    """when the load that brings it here began; monotonic seconds"""
    copy: CopyStates
    leases: int = 0
    copying: bool = False
    load_seconds: float = 0.0
    weights: AdapterWeights | None = None
    """Set when the adapter is wholly there and the table names it."""

    @property
    def size(self) -> int:
        return self.host.size

    @property
    def idle(self) -> bool:
        return self.leases == 0 and self.copy.ended.is_set()


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
        self.hosts = HostTier(self.loader, config.host_memory, dtype)
        self._device: OrderedDict[str, DeviceAdapter] = OrderedDict()
        self._loading: list[DeviceAdapter] = []
        """Those of `_device` that are not switched in yet."""
        self._free_slots = list(range(config.adapter_slots - 1, -1, -1))
        self._releasing: list[tuple[str, Sequence[Event]]] = []

    # --- what the engine calls for a request

    def announce(self, adapter: Adapter) -> str:
        """A request waits for the adapter: start its load. Returns where it is now: none (device), host or absent.

        Each call is answered by one `retract`, when the request leaves the queue.
        """
        self.hosts.announce(adapter.digest)
        if self.ready(adapter.digest):
            return "none"
        host = self.hosts.load(adapter)
        return "host" if host.complete and not host.failed else "absent"

    def retract(self, digest: str) -> None:
        """A request waits no more."""
        self.hosts.retract(digest)

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

    def release(self, lease: Lease, after: Sequence[Event]) -> None:
        """The lease ends when every event in `after` has."""
        waiting = [event for event in after if not event.query()]
        if waiting:
            self._releasing.append((lease.digest, waiting))
        else:
            self._drop_lease(lease.digest)

    def on_device(self, digest: str) -> bool:
        """The adapter has room on the device: a lease on it needs no more."""
        return digest in self._device

    def ready(self, digest: str) -> bool:
        """The whole adapter is on the device and the table names it."""
        entry = self._device.get(digest)
        return entry is not None and entry.weights is not None

    def state(self, lease: Lease, layer: int) -> int:
        """A LayerState."""
        entry = self._device[lease.digest]
        if entry.copy.failed:
            return LayerState.FAILED
        if layer < entry.copy.arrived:
            return LayerState.DEVICE
        return LayerState.HOST if layer < entry.host.ready else LayerState.NO

    def loaded(self, lease: Lease) -> bool:
        return self.ready(lease.digest)

    def source(self, lease: Lease) -> str:
        """Where an adapter that is not loaded comes from: host or absent."""
        entry = self._device[lease.digest]
        return "host" if entry.host.complete and entry.began > entry.host.began else "absent"

    def load_seconds(self, lease: Lease) -> float:
        """How long its load took; 0 while it goes on."""
        return self._device[lease.digest].load_seconds

    def failure(self, lease: Lease) -> str:
        """Why the load failed, or an empty string."""
        return self._device[lease.digest].copy.failed

    def weights(self, lease: Lease) -> AdapterWeights:
        found = self._device[lease.digest].weights
        if found is None:
            raise RuntimeError(f"adapter {lease.digest} is read before it is on the device")
        return found

    # --- what the engine calls once per iteration

    def poll(self) -> None:
        """Switch in what has arrived, end releases whose events have ended, and let the host tier go on."""
        releasing, self._releasing = self._releasing, []
        for digest, events in releasing:
            self.release(Lease(digest, -1, ()), events)
        self.hosts.poll()
        self._loading = [entry for entry in self._loading if not self._advance_load(entry)]

    def close(self) -> None:
        self.loader.close()

    # --- reports

    def residents(self) -> list[Resident]:
        on_device = [Resident(d, "device", e.size, e.leases) for d, e in self._device.items() if e.weights is not None]
        on_host = [Resident(h.digest, "host", h.size, 0) for h in self.hosts.complete() if h.digest not in self._device]
        return on_device + on_host

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, or held by adapters that nobody leases."""
        return self.pool.free_bytes + sum(entry.size for entry in self._device.values() if entry.idle)

    @property
    def leases(self) -> int:
        return sum(entry.leases for entry in self._device.values())

    # --- inside

    def _place(self, adapter: Adapter) -> DeviceAdapter | NoRoom | Pending | TooLarge | LoadFailed:
        """Room on the device for an adapter that has none; its copy starts when it is in host memory."""
        host = self.hosts.load(adapter)  # it may have been evicted since it was announced
        if host.failed:
            return LoadFailed(host.failed)
        if host.layout is None:
            return Pending()
        limit = min(self.pool.size, self.hosts.memory)
        if host.size > limit:
            self.hosts.forget(host)
            return TooLarge(host.size, limit)
        if host.data is None:
            return Pending()  # host memory is full of loads; this one is next in line
        room = self._make_room(host)
        if room is None:
            return NoRoom()
        began = time.monotonic() if host.complete else host.began
        entry = DeviceAdapter(host, self._free_slots.pop(), *room, began, CopyStates())
        host.placed = True
        self._device[adapter.digest] = entry
        self._loading.append(entry)
        return entry

    def _make_room(self, host: HostAdapter) -> tuple[int, int] | None:
        """(pool unit, table entry), evicting idle adapters only where that makes enough room."""
        assert host.layout is not None  # measured before it is placed
        rows = max(1, host.layout.rows)
        victims = self._victims(-(-host.size // ROW_ALIGN))
        if victims is None:
            return None
        for victim in [None, *victims]:
            if victim is not None:
                self._evict(victim)
            start = self.pool.allocate(host.size) if self._free_slots else None
            if start is None:
                continue
            run = self.table.reserve(rows)
            if run is not None:
                return start, run
            self.pool.release(start)
        return None

    def _victims(self, need: int) -> list[str] | None:
        """Idle adapters whose eviction makes a run of `need` units, least recently used first; None if none can.

        Between two neighbouring adapters in use lies a stretch of free units and idle adapters. Of the stretches that
        are long enough, the one whose youngest adapter was used longest ago is taken.
        """
        age = {digest: i for i, digest in enumerate(self._device)}
        stretches: list[list[str]] = []
        begin, idle = 0, list[str]()
        placed = sorted((entry.start, digest) for digest, entry in self._device.items())
        for start, digest in [*placed, (self.pool.units, "")]:
            entry = self._device.get(digest)
            if entry is not None and entry.idle:
                idle.append(digest)
                continue
            if start - begin >= need:
                stretches.append(sorted(idle, key=age.__getitem__))
            if entry is not None:
                begin, idle = start + max(1, -(-entry.size // ROW_ALIGN)), []
        if not stretches:
            return None
        best = min(stretches, key=lambda stretch: age[stretch[-1]] if stretch else -1)
        if not self._free_slots and not best:
            best = [digest for digest, entry in self._device.items() if entry.idle][:1]
        return best if best or self._free_slots else None

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
        if entry.copy.failed and entry.idle:
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
        host.placed = False
        if not copy.failed:
            assert host.layout is not None
            self.table.set(entry.slot, entry.run, entry.start, host.layout)
            entry.weights = view_weights(self.pool, entry.start, host.layout, self.base)
            entry.load_seconds = time.monotonic() - entry.began
            return True
        if not host.failed:
            self.hosts.forget(host)  # the copy failed: the next request reads the store again
        if entry.leases == 0:
            self._evict(host.digest)
        return True
