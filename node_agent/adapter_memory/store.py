"""AdapterStore: who may read which adapter on the device, and what is loaded or evicted for it.

Every method is called by the engine's thread alone and none of them blocks; loader threads only fill pages that were
handed to them. Which adapters have room on the device, and lose it, is up to `device_room`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial

import torch

from adapters.base_model import BaseModel
from adapters.store import ObjectStore
from cluster.messages import Adapter
from cluster.news import Resident
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.device_loads import DeviceLoads
from node_agent.adapter_memory.device_room import DeviceRoom
from node_agent.adapter_memory.disk_cache import open_cache
from node_agent.adapter_memory.eviction import POLICIES
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.host_map import HostMap, SharedTable, export
from node_agent.adapter_memory.host_memory import HostMemory
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.link import Link
from node_agent.adapter_memory.loader import Loader
from node_agent.adapter_memory.loader_threads import Priority
from node_agent.adapter_memory.loads import CopyStates, DeviceAdapter, HostAdapter
from node_agent.adapter_memory.pages import choose_page_size
from node_agent.adapter_memory.pool import device_pool
from node_agent.adapter_memory.table import AdapterTable, rows_for
from node_agent.adapter_memory.weights import AdapterWeights, ArrivingWeights, LayerWeights, view_weights
from node_agent.config import EngineConfig
from node_agent.device import Event
from node_agent.states import DeviceState, HostState
from node_agent.types import LayerState, Lease, LoadFailed, NoRoom, Pending, TooLarge

MAX_ON_DISK = 256
"""Adapters on the disk that a report names."""


class AdapterStore:
    """Two tiers of pages, `host_memory` bytes of host memory and `adapter_memory` bytes on the device, and perhaps a
    cache on the disk below them."""

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
        page_size = choose_page_size(base, dtype.itemsize)
        self.pool = device_pool(config.adapter_memory, page_size, device, dtype)
        self.host_memory = HostMemory(config.host_memory, page_size, dtype, pinned=device.type == "cuda")
        self.host_table = SharedTable(self.host_memory.pool, base)
        rows = rows_for(self.pool.pages.count * self.pool.page_units, base, dtype.itemsize)
        self.table = AdapterTable(config.adapter_slots, rows, base.num_layers, device)
        links = Link(config.store_link, "store"), Link(config.load_link, "device")
        self.simulated_link = config.load_link
        self.cache = open_cache(config.disk_cache, base)
        self.loader = Loader(store, base, self.host_memory.pool, self.pool, *links, on_change, self.cache)
        self.demand, policy = Demand(), POLICIES[config.eviction]
        pool, table = self.host_memory.pool, self.host_table.table
        self.hosts = HostTier(self.loader, pool, table, memory=config.host_memory, eviction=policy(self.demand))
        self.adapter_memory = config.adapter_memory
        self.room = DeviceRoom(self.pool, self.table, self.hosts, policy(self.demand))
        self.device = self.hosts.on_device = self.room.adapters
        self.loads = DeviceLoads(self.loader, self.hosts, self.room)
        """loads of those adapters of `device` that are not switched in yet"""
        self._releasing: list[tuple[str, Sequence[Event]]] = []

    # --- what the engine calls for a request

    def announce(self, adapter: Adapter, priority: Priority = Priority.REQUEST, spared: Container[str] = ()) -> str:
        """Counts a request (or a prefetch) that waits for the adapter, and starts the adapter's load.

        Returns where the adapter is: none (device), host, disk or absent. `spared`: as in HostTier.announce. Each call
        is answered by one `retract`, when the request leaves the queue.
        """
        self.hosts.announce(adapter.digest, priority, spared)
        if self.ready(adapter.digest):
            return "none"
        host = self.hosts.load(adapter)
        return "host" if host.complete else host.origin

    def retract(self, digest: str, priority: Priority = Priority.REQUEST) -> None:
        """Counts one request (or prefetch) less that waits for the adapter."""
        self.hosts.retract(digest, priority)
        entry = self.device.get(digest)
        if entry is not None:
            self.loads.end_unwanted(entry)

    def acquire(
        self, adapter: Adapter, order: Sequence[int] | None = None, spared: Container[str] = ()
    ) -> Lease | NoRoom | Pending | TooLarge | LoadFailed:
        """Returns a lease on the adapter's slot, also while its load runs; or the reason why not (now, or ever).

        `order`: as in `set_order`, for a copy that this call begins; `spared`: digests of adapters that are not evicted
        for it.
        """
        entry = self.device.get(adapter.digest)
        if entry is None:
            placed = self._place(adapter, order, spared)
            if isinstance(placed, NoRoom) and self.loads.reclaim(Priority.REQUEST):
                return Pending()
            if not isinstance(placed, DeviceAdapter):
                return placed
            entry = placed
        elif entry.copy.abandoned:
            return Pending()  # it is about to go; the next load begins then
        elif entry.copy.failure is not None:
            return entry.copy.failure
        if entry.prefetched and not (entry.leases or entry.settled):
            entry.began = time.monotonic()  # the seconds before are none of the request's own
        entry.leases += 1
        self.hosts.record_lease(entry.host, True)
        self.room.record_call(adapter.digest)
        return Lease(adapter.digest, entry.slot, entry.layout.ranks)  # a message's may be wrong: kernels rely on these

    def release(self, lease: Lease, after: Sequence[Event], served: bool = False) -> None:
        """Ends the lease when every event in `after` has ended. `served`: a load that is still under way was not in
        vain."""
        self.device[lease.digest].served |= served
        waiting = [event for event in after if not event.query()]
        if waiting:
            self._releasing.append((lease.digest, waiting))
        else:
            self._drop_lease(lease.digest)

    def on_device(self, digest: str) -> bool:
        """Returns whether the adapter has room on the device: a lease on it needs no more."""
        return digest in self.device

    def fits_without(self, adapter: Adapter, evicted: Collection[str]) -> bool:
        """Returns whether the adapter would fit on the device if the adapters with digests `evicted` left it, as
        well as the idle ones. False while its layout is not known."""
        host = self.hosts.get(adapter.digest)
        return host is not None and host.layout is not None and self.room.fits_without(host.layout, evicted)

    def choose_spared(self, adapter: Adapter, digests: Iterable[str]) -> Container[str]:
        """Returns those of `digests` that need not be evicted for the adapter, as in DeviceRoom.choose_spared. None of
        them while its layout is not known: it takes no room yet."""
        host = self.hosts.get(adapter.digest)
        return self.room.choose_spared(host.layout, digests) if host is not None and host.layout is not None else ()

    def ready(self, digest: str) -> bool:
        """Returns whether the whole adapter is on the device."""
        entry = self.device.get(digest)
        return entry is not None and entry.weights is not None

    def state(self, lease: Lease, layer: int) -> int:
        """Returns the layer's LayerState."""
        entry = self.device[lease.digest]
        if entry.copy.failure is not None:
            return LayerState.FAILED
        state = entry.copy.layers[layer]
        if state != LayerState.NO:
            return state
        return LayerState.HOST if entry.host.here[layer] else LayerState.NO

    def loaded(self, lease: Lease) -> bool:
        return self.ready(lease.digest)

    def source(self, lease: Lease) -> str:
        """Returns the tier from which the load of a leased adapter brings it: host, disk, or absent (the object
        store)."""
        entry = self.device[lease.digest]
        return "host" if entry.host.complete and entry.began > entry.host.began else entry.host.origin

    def load_seconds(self, lease: Lease) -> float:
        """Returns how long the adapter's load took (seconds); 0 while it runs."""
        return self.device[lease.digest].load_seconds

    def crossing(self, lease: Lease) -> tuple[int, float]:
        """Returns the bytes that crossed to the device while the adapter did, its own and all others, and the seconds
        that this took. Returns zeros for a load that began as a prefetch: the link may have been idle while that gave
        way to loads whose bytes had not reached host memory."""
        entry = self.device[lease.digest]
        if entry.prefetched:
            return 0, 0.0
        copy = entry.copy
        return copy.bytes_after - copy.bytes_before, copy.arrived - copy.began

    def fetch_seconds(self, lease: Lease) -> float:
        """Returns the seconds from the load's beginning until the latest layer reached host memory; 0 when all were
        there already. Of a loaded adapter that is its whole fetch."""
        entry = self.device[lease.digest]
        return max(0.0, entry.host.arrived - entry.began)

    def layout(self, lease: Lease) -> AdapterLayout:
        return self.device[lease.digest].layout

    def host_seconds(self, lease: Lease, layer: int) -> float:
        """Returns how long a layer that is not in host memory will take to get there, as loads went lately."""
        host = self.device[lease.digest].host
        return self.hosts.rates.seconds(host.origin, host.bytes_left(layer))

    @property
    def loads_in_flight(self) -> int:
        """Returns the number of loads that share the link to the device."""
        return len(self.loads.awaited)

    def failure(self, lease: Lease) -> LoadFailed | None:
        """Returns why the adapter's load failed; None unless it did."""
        return self.device[lease.digest].copy.failure

    def set_order(self, lease: Lease, layers: Sequence[int]) -> None:
        """Sets the order in which the adapter's layers go to the device, as far as they are in host memory; it is
        ascending otherwise.

        Raises ValueError unless `layers` names each layer once.
        """
        self.loader.set_order(self.device[lease.digest].copy, layers)

    def layer_weights(self, lease: Lease, layer: int) -> LayerWeights:
        """Returns one layer that is on the device, whether or not the others are. Raises RuntimeError when it is not.

        The layer stays readable when the load fails on a later layer: a pass may be in the midst of it, and it was
        verified. One whose copy is enqueued is read on the stream, after `await_copy`.
        """
        copy = self.device[lease.digest].copy
        views = copy.views[layer]
        if views is None or copy.layers[layer] not in (LayerState.ENQUEUED, LayerState.DEVICE):
            raise RuntimeError(f"layer {layer} of adapter {lease.digest} is read before it is on the device")
        return views

    def await_copy(self, lease: Lease, layer: int) -> None:
        """Has whatever is enqueued on the current stream from now on run after the copy of a layer that is ENQUEUED.
        Returns at once."""
        event = self.device[lease.digest].copy.events[layer]
        if event is not None:
            event.wait()

    def weights(self, lease: Lease) -> AdapterWeights:
        """Returns the adapter's weights by layer. Asking for a layer that is not on the device yet raises
        RuntimeError."""
        return self.device[lease.digest].weights or ArrivingWeights(
            self.base.num_layers, partial(self.layer_weights, lease)
        )

    # --- for CPU workers, which compute from host memory

    @property
    def host_map(self) -> HostMap:
        """Returns what another process needs to read host memory."""
        return export(self.host_memory, self.host_table)

    def hold_host(self, lease: Lease) -> HostAdapter | None:
        """Keeps the leased adapter's host pages, and its slot of the host table, what they are until `release_host`.

        That holds even if its load ends or fails. Returns None when it has none (any more). Only layers whose state is
        HOST or later may be read.
        """
        host = self.device[lease.digest].host
        return host if self.hosts.hold(host) else None

    def release_host(self, host: HostAdapter) -> None:
        """Ends a hold of `hold_host`: no worker reads the adapter any more. Raises RuntimeError when it was released
        before."""
        self.hosts.let_go(host)

    # --- for prefetches

    def place(self, adapter: Adapter, spared: Container[str] = ()) -> NoRoom | Pending | TooLarge | LoadFailed | None:
        """Begins to copy an adapter that lies in host memory to the device, evicting none that is `spared`. Nobody
        leases it: until the copy has ended, requests may take its room. Returns None, or why not."""
        placed = self._place(adapter, None, spared)
        return None if isinstance(placed, DeviceAdapter) else placed

    @property
    def urgent_loads(self) -> bool:
        """Returns whether a request, or an operator's prefetch, waits for a load or for its beginning."""
        return self.loads_in_flight > 0 or any(not self.ready(digest) for digest in self.hosts.awaited())

    # --- residency

    def expect(self, chances: Mapping[str, float]) -> None:
        """Replaces the forecast: by digest, the probability of a call within 30 s. An adapter that is absent is judged
        by its own calls alone. Raises ValueError unless each is between 0 and 1."""
        self.demand.expect(chances)

    def pin(self, device: Iterable[str], host: Iterable[str] = ()) -> None:
        """Pins adapters: once there, those of `device` stay on the device, and those of `host` in host memory. Replaces
        what was pinned before."""
        self.room.pinned, self.hosts.pinned = frozenset(device), frozenset(host)

    def discard(self, digest: str) -> bool:
        """Takes an adapter that nobody uses off the device, pinned or not. Returns False when somebody uses it, or it
        is not there."""
        entry = self.device.get(digest)
        if entry is None or not entry.idle:
            return False
        self.room.evict(digest)
        return True

    # --- for measurements

    def lend(self, digest: str, layout: AdapterLayout, evicts: bool = True) -> Lease | None:
        """Gives room on the device to an adapter that nobody deployed; its weights are whatever lies there. Returns its
        lease, or None: there is too little that is free, also (`evicts`) by evicting idle adapters. It goes with
        `release` and `discard`."""
        place = self.room.take(digest, layout, evicts)
        if place is None:
            return None
        host = HostAdapter(digest, "", HostState.COMPLETE, layout=layout)
        copy = CopyStates.of(len(layout.layers), LayerState.DEVICE, DeviceState.READY)
        entry = DeviceAdapter(host, layout, *place, time.monotonic(), copy, leases=1)
        entry.weights = view_weights(self.pool, layout.positions(entry.pages), layout, self.base)
        self.room.move_in(entry)
        return Lease(digest, entry.slot, layout.ranks)

    # --- what the engine calls once per iteration

    def poll(self) -> None:
        """Takes note of what has arrived, ends releases whose events have ended, and polls the host tier."""
        releasing, self._releasing = self._releasing, []
        for digest, events in releasing:
            self.release(Lease(digest, -1, ()), events)
        self.hosts.poll()
        self.loads.poll()

    def close(self) -> None:
        self.loader.close()
        self.host_memory.close()
        self.host_table.close()

    # --- reports

    def residents(self) -> list[Resident]:
        on_device = [Resident(d, "device", e.size, e.leases) for d, e in self.device.items() if e.weights is not None]
        on_host = [Resident(h.digest, "host", h.size, 0) for h in self.hosts.complete() if h.digest not in self.device]
        above = {resident.digest for resident in on_device + on_host}
        cached = self.cache.contents() if self.cache is not None else ()
        on_disk = [Resident(digest, "disk", size, 0) for digest, size in cached if digest not in above]
        return on_device + on_host + on_disk[:MAX_ON_DISK]

    @property
    def free_bytes(self) -> int:
        """Returns the bytes of the device that are free, or held by adapters that nobody leases."""
        return self.pool.free_bytes + sum(entry.size for entry in self.device.values() if entry.idle)

    @property
    def loading_bytes(self) -> int:
        """Returns the bytes on their way to the device, or awaited there by queued requests. Layers that have arrived
        do not count, nor do predicted prefetches, which yield to any request."""
        return sum(entry.bytes_left for entry in self.loads.awaited) + self.hosts.bytes_awaited(self.device)

    @property
    def leases(self) -> int:
        return sum(entry.leases for entry in self.device.values())

    @property
    def largest(self) -> int:
        """Returns the bytes that one adapter may have: it has to fit in both tiers."""
        return min(self.adapter_memory, self.hosts.memory)

    # --- inside

    def _place(
        self, adapter: Adapter, order: Sequence[int] | None, spared: Container[str] = ()
    ) -> DeviceAdapter | NoRoom | Pending | TooLarge | LoadFailed:
        """Gives the adapter, which has none, room on the device; each layer is copied once it is in host memory.
        Returns why where it can't."""
        host = self.hosts.load(adapter)  # it may have been evicted since it was announced
        if host.state is HostState.ABANDONED:  # just now: the next call starts it again
            return Pending()
        if host.failed and host.failure is not None:
            return host.failure
        if host.layout is None:
            return Pending()
        if host.size > self.largest:
            self.hosts.forget(host)
            return TooLarge(host.size, self.largest)
        if host.pages is None:
            return Pending()  # host memory is full of loads; this one is next in line
        place = self.room.take(adapter.digest, host.layout, spared=spared)
        if place is None:
            return NoRoom()
        return self.loads.begin(host, place, order) or Pending()  # the next call says how it ended

    def _drop_lease(self, digest: str) -> None:
        entry = self.device[digest]
        if entry.leases <= 0:
            raise RuntimeError(f"a lease on {digest} was released twice")
        entry.leases -= 1
        self.hosts.record_lease(entry.host, entry.leases > 0)
        if entry.copy.failure is not None and entry.idle:
            self.room.evict(digest)
        else:
            self.loads.end_unwanted(entry)
