"""AdapterStore: leases on adapters on the device, and the loads and evictions that they need.

Only the engine's thread calls its methods, and none of them blocks. Loader threads only fill the pages that they are
given. `device_room` decides which adapters have pages on the device and which are evicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import torch

from adapters.base_model import BaseModel
from adapters.store import ObjectStore
from cluster.messages import Adapter
from cluster.news import Resident
from cluster.residency import AdapterStates, HeldTier
from node_agent.adapter_memory.cached_artifact import open_artifact_cache
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.device_loads import DeviceLoads
from node_agent.adapter_memory.device_room import DeviceRoom
from node_agent.adapter_memory.disk_cache import MAX_REPORTED, on_disk_alone
from node_agent.adapter_memory.eviction import POLICIES
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.host_map import HostMap, SharedTable, export
from node_agent.adapter_memory.host_memory import HostMemory
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.leased import LeasedAdapters
from node_agent.adapter_memory.link import Link
from node_agent.adapter_memory.loader import Loader
from node_agent.adapter_memory.loads import CopyStates, DeviceAdapter, HostAdapter
from node_agent.adapter_memory.pages import choose_page_size
from node_agent.adapter_memory.pool import device_pool
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.residency import adapter_states, evict, tier_of
from node_agent.adapter_memory.table import AdapterTable, rows_for
from node_agent.adapter_memory.weights import view_weights
from node_agent.config import EngineConfig
from node_agent.device_event import Event
from node_agent.leases import LayerState, Lease, LoadFailed, NoRoom, Pending, TooLarge
from node_agent.states import DeviceState, HostState


class AdapterStore(LeasedAdapters):
    """Adapters in two tiers: `host_memory` bytes of host memory and `adapter_memory` bytes on the device. A disk cache
    below them is optional."""

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
        self.cache = open_artifact_cache(config.disk_cache, base)
        self.loader = Loader(store, base, self.host_memory.pool, self.pool, *links, on_change, self.cache)
        self.demand, policy = Demand(), POLICIES[config.eviction]
        pool, table = self.host_memory.pool, self.host_table.table
        self.hosts = HostTier(self.loader, pool, table, memory=config.host_memory, eviction=policy(self.demand))
        self.adapter_memory = config.adapter_memory
        self.room = DeviceRoom(self.pool, self.table, self.hosts, policy(self.demand))
        self.device = self.hosts.on_device = self.room.adapters
        self.loads = DeviceLoads(self.loader, self.hosts, self.room)
        """loads of the adapters in `device` that are not complete yet"""
        self._releasing: list[tuple[str, Sequence[Event]]] = []

    # --- what the engine calls for a request

    def announce(
        self, adapter: Adapter, priority: Priority = Priority.REQUEST, spared: Container[str] = (), tenant: str = ""
    ) -> str:
        """Adds a request or prefetch that waits for the adapter, and starts the adapter's load.

        Returns the adapter's tier: host, disk or absent; none if it is already on the device. `spared` and `tenant`:
        as in HostTier.announce. The caller must call `retract` once per call, when the request leaves the queue.
        """
        self.hosts.announce(adapter.digest, priority, spared, tenant)
        if self.ready(adapter.digest):
            return "none"
        host = self.hosts.load(adapter)
        return "host" if host.complete else host.origin

    def retract(self, digest: str, priority: Priority = Priority.REQUEST) -> None:
        """Removes a request or prefetch that waits for the adapter."""
        self.hosts.retract(digest, priority)
        entry = self.device.get(digest)
        if entry is not None:
            self.loads.end_unwanted(entry)

    def acquire(
        self, adapter: Adapter, order: Sequence[int] | None = None, spared: Container[str] = ()
    ) -> Lease | NoRoom | Pending | TooLarge | LoadFailed:
        """Returns a lease on the adapter's slot, even while its load runs. Otherwise returns the temporary or permanent
        reason for refusal.

        `order`: as in `set_order`, if this call starts the copy. `spared`: digests that must not be evicted for it.
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
            return Pending()  # its copy was cancelled; the next load begins after its end
        elif entry.copy.failure is not None:
            return entry.copy.failure
        if entry.prefetched and not (entry.leases or entry.settled):
            entry.began = time.monotonic()  # time before the request does not count as its load time
        entry.leases += 1
        self.hosts.record_lease(entry.host, True)
        self.room.record_call(adapter.digest)
        return Lease(
            adapter.digest, entry.slot, entry.layout.ranks
        )  # ranks of a message may be wrong, and kernels rely on these

    def release(self, lease: Lease, after: Sequence[Event], served: bool = False) -> None:
        """Ends the lease once all events in `after` have ended. With `served`, a running load continues after the
        lease."""
        self.device[lease.digest].served |= served
        waiting = [event for event in after if not event.query()]
        if waiting:
            self._releasing.append((lease.digest, waiting))
        else:
            self._drop_lease(lease.digest)

    def on_device(self, digest: str) -> bool:
        """Returns whether the adapter has pages on the device, loaded or not. A lease on it then needs no further
        room."""
        return digest in self.device

    def fits_without(self, adapter: Adapter, evicted: Collection[str]) -> bool:
        """Returns whether the adapter would fit on the device without the idle adapters and those in `evicted`. Returns
        False until its layout is known."""
        host = self.hosts.get(adapter.digest)
        return host is not None and host.layout is not None and self.room.fits_without(host.layout, evicted)

    def choose_spared(self, adapter: Adapter, digests: Iterable[str]) -> Container[str]:
        """Returns those of `digests` that need not be evicted for the adapter, as in DeviceRoom.choose_spared. Returns
        none until its layout is known."""
        host = self.hosts.get(adapter.digest)
        return self.room.choose_spared(host.layout, digests) if host is not None and host.layout is not None else ()

    @property
    def loads_in_flight(self) -> int:
        """Returns the number of loads that share the link to the device, without predicted prefetches."""
        return len(self.loads.awaited)

    def set_order(self, lease: Lease, layers: Sequence[int]) -> None:
        """Sets the order in which layers that are in host memory are copied to the device. The default is ascending.

        Raises ValueError unless `layers` names each layer once.
        """
        self.loader.set_order(self.device[lease.digest].copy, layers)

    # --- for CPU workers, which compute from host memory

    @property
    def host_map(self) -> HostMap:
        """Returns the descriptors and shapes with which another process maps host memory."""
        return export(self.host_memory, self.host_table)

    def hold_host(self, lease: Lease) -> HostAdapter | None:
        """Keeps the leased adapter's host pages, and its slot in the host table, until `release_host`. They stay even
        if the load ends or fails. Returns None if the adapter has no host pages.

        Only layers whose state is HOST or later may be read.
        """
        host = self.device[lease.digest].host
        return host if self.hosts.hold(host) else None

    def release_host(self, host: HostAdapter) -> None:
        """Ends a hold of `hold_host`, once no worker reads the adapter. Raises RuntimeError if it was already
        released."""
        self.hosts.let_go(host)

    # --- for prefetches

    def place(self, adapter: Adapter, spared: Container[str] = ()) -> NoRoom | Pending | TooLarge | LoadFailed | None:
        """Starts to copy an adapter from host memory to the device, without a lease and without evicting adapters in
        `spared`. Until the copy has ended, requests may take its room. Returns None on success, else the reason."""
        placed = self._place(adapter, None, spared)
        return None if isinstance(placed, DeviceAdapter) else placed

    @property
    def urgent_loads(self) -> bool:
        """Returns whether a request or an operator's prefetch waits for a load."""
        return self.loads_in_flight > 0 or any(not self.ready(digest) for digest in self.hosts.awaited())

    # --- residency

    def expect(self, chances: Mapping[str, float]) -> None:
        """Replaces the forecast: the probability, by digest, of a call within 30 s. Adapters without a forecast are
        judged by their past calls alone. Raises ValueError unless each probability is between 0 and 1."""
        self.demand.expect(chances)

    def pin(self, device: Iterable[str], host: Iterable[str] = ()) -> None:
        """Replaces the sets of pinned adapters. Once loaded, adapters in `device` stay on the device, and those in
        `host` in host memory."""
        self.room.pinned, self.hosts.pinned = frozenset(device), frozenset(host)

    def discard(self, digest: str) -> bool:
        """Evicts an idle adapter from the device, pinned or not. Returns False when the adapter is in use or not on the
        device."""
        entry = self.device.get(digest)
        if entry is None or not entry.idle:
            return False
        self.room.evict(digest)
        return True

    # --- for operators

    def states(self) -> AdapterStates:
        """Returns the state of each adapter."""
        return adapter_states(self)

    def tier(self, digest: str) -> HeldTier:
        """Returns the highest tier with the complete adapter: device, host or disk; absent when none has it."""
        return tier_of(self, digest)

    def evict(self, digest: str) -> bool:
        """Evicts the adapter from device, host memory and disk. Returns False when it is in none of them. Raises
        InUse."""
        return evict(self, digest)

    # --- for measurements

    def lend(self, digest: str, layout: AdapterLayout, evicts: bool = True) -> Lease | None:
        """Allocates room on the device for an adapter without an artifact, with arbitrary weights. Returns its lease;
        None when there is too little room.

        `evicts`: whether idle adapters may be evicted. `release` and then `discard` free the room.
        """
        place = self.room.allocate(digest, layout, evicts)
        if place is None:
            return None
        host = HostAdapter(digest, "", HostState.COMPLETE, layout=layout)
        copy = CopyStates.of(len(layout.layers), LayerState.DEVICE, DeviceState.READY)
        entry = DeviceAdapter(host, layout, *place, time.monotonic(), copy, leases=1)
        entry.weights = view_weights(self.pool, layout.positions(entry.pages), layout, self.base)
        self.room.assign(entry)
        return Lease(digest, entry.slot, layout.ranks)

    # --- once per engine iteration

    def poll(self) -> None:
        """Processes arrivals, ends leases whose events have ended, and polls the host tier."""
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
        """Returns the adapters by their highest tier, with MAX_REPORTED at most on disk alone."""
        on_device = [Resident(d, "device", e.size, e.leases) for d, e in self.device.items() if e.weights is not None]
        on_host = [Resident(h.digest, "host", h.size, 0) for h in self.hosts.complete() if h.digest not in self.device]
        above = {resident.digest for resident in on_device + on_host}
        on_disk = [Resident(digest, "disk", size, 0) for digest, size in on_disk_alone(self.cache, above)]
        return on_device + on_host + on_disk[:MAX_REPORTED]

    @property
    def free_bytes(self) -> int:
        """Returns the bytes of the device that are free, or used by idle adapters."""
        return self.pool.free_bytes + sum(entry.size for entry in self.device.values() if entry.idle)

    @property
    def loading_bytes(self) -> int:
        """Returns the bytes that still have to reach the device for running loads and queued requests. Arrived layers
        and predicted prefetches do not count; any request takes precedence over the latter."""
        return sum(entry.bytes_left for entry in self.loads.awaited) + self.hosts.bytes_awaited(self.device)

    @property
    def leases(self) -> int:
        """Number of leases on adapters."""
        return sum(entry.leases for entry in self.device.values())

    @property
    def largest(self) -> int:
        """Returns the maximum bytes of one adapter: it must fit in both tiers."""
        return min(self.adapter_memory, self.hosts.memory)

    # --- inside

    def _place(
        self, adapter: Adapter, order: Sequence[int] | None, spared: Container[str] = ()
    ) -> DeviceAdapter | NoRoom | Pending | TooLarge | LoadFailed:
        """Allocates room on the device for an adapter that has none. Starts to copy each layer once it is in host
        memory. Returns the reason when it can't."""
        host = self.hosts.load(adapter)  # it may have been evicted since `announce`
        if host.state is HostState.ABANDONED:  # just abandoned: the next call starts the load again
            return Pending()
        if host.failed and host.failure is not None:
            return host.failure
        if host.layout is None:
            return Pending()
        if host.size > self.largest:
            self.hosts.forget(host)
            return TooLarge(host.size, self.largest)
        if host.pages is None:
            return Pending()  # host memory is full of loads; this one waits for room
        place = self.room.allocate(adapter.digest, host.layout, spared=spared)
        if place is None:
            return NoRoom()
        return (
            self.loads.begin(host, place, order) or Pending()
        )  # None: the load has just failed; the next call returns why

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
