"""Adapter memory of a node with vLLM: its slots on the device, above the folders in host memory.

What leaves a slot is decided here, so vLLM never evicts an adapter by itself: no more adapters are loaded than there
are slots, and one is removed before another takes its place. An adapter whose requests run is never removed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.messages import Adapter
from cluster.news import Resident
from cluster.residency import AdapterState, AdapterStates, HeldTier
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.disk_cache import MAX_LISTED, MAX_REPORTED, on_disk_alone, tier_below
from node_agent.adapter_memory.eviction import Candidate, LeastRecentlyUsed
from node_agent.adapter_memory.priority import Priority
from node_agent.device_event import Event
from node_agent.leases import InUse, Lease, LoadFailed, NoRoom, Pending, TooLarge
from node_agent.vllm.folder import Folder
from node_agent.vllm.folders import FolderTier


@dataclass(eq=False)
class Slot:
    """Adapter that has a slot, loaded or not."""

    adapter: Adapter
    index: int
    """index of the slot, from 0"""
    number: int
    """vLLM's `lora_int_id`, which no other load of this process has"""
    folder: Folder
    began: float
    leases: int = 0
    ready: bool = False
    failure: LoadFailed | None = None
    arrived: float = 0.0
    """end of the load in monotonic seconds; 0 while it runs"""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.adapter.ranks

    @property
    def idle(self) -> bool:
        return self.leases == 0 and (self.ready or self.failure is not None)

    @property
    def copied(self) -> float:
        return float(self.ready)


@dataclass
class SlotLimits:
    """Limits of vLLM's slots."""

    count: int
    """`max_loras`"""
    max_rank: int
    """`max_lora_rank`"""
    bytes: int
    """bytes that vLLM reserves for one slot"""


@dataclass
class AdapterOrders:
    """Functions by which the slots are filled and emptied."""

    add: Callable[[Slot], None]
    """Loads the adapter; `SlotStore.record_load` is called with its end."""
    remove: Callable[[Slot], None]
    """Frees the slot before any later load."""


@dataclass
class _Release:
    digest: str
    after: Sequence[Event] = field(default_factory=tuple)


class SlotStore:
    """Adapters in slots and folders (node_agent.engine.adapter_tiers.AdapterTiers)."""

    def __init__(
        self,
        hosts: FolderTier,
        limits: SlotLimits,
        orders: AdapterOrders,
        demand: Demand,
        eviction: LeastRecentlyUsed,
    ) -> None:
        self.hosts, self.limits, self.demand = hosts, limits, demand
        self.adapter_memory = limits.count * limits.bytes
        self.device: OrderedDict[str, Slot] = OrderedDict()
        self._orders, self._eviction = orders, eviction
        self._free = list(range(limits.count - 1, -1, -1))
        self._number = 0
        self._pinned: frozenset[str] = frozenset()
        self._releasing: list[_Release] = []

    # --- for requests

    def announce(
        self, adapter: Adapter, priority: Priority = Priority.REQUEST, spared: Container[str] = (), tenant: str = ""
    ) -> str:
        self.hosts.announce(adapter.digest, priority, spared, tenant)
        if self.ready(adapter.digest):
            return "none"
        folder = self.hosts.load(adapter)
        return "host" if folder.complete else folder.origin

    def retract(self, digest: str, priority: Priority = Priority.REQUEST) -> None:
        self.hosts.retract(digest, priority)

    def acquire(
        self, adapter: Adapter, *, spared: Container[str] = ()
    ) -> Lease | NoRoom | Pending | TooLarge | LoadFailed:
        slot = self.device.get(adapter.digest)
        if slot is None:
            placed = self._place(adapter, spared)
            if not isinstance(placed, Slot):
                return placed
            slot = placed
        elif slot.failure is not None:
            failure = slot.failure
            if slot.idle:
                self._evict(slot)
            return failure
        slot.leases += 1
        slot.folder.leased = True
        self.demand.record_call(adapter.digest, time.monotonic())
        self._eviction.record_call(adapter.digest)
        self.hosts.record_call(adapter.digest)
        self.device.move_to_end(adapter.digest)
        return Lease(adapter.digest, slot.index, slot.ranks)

    def release(self, lease: Lease, after: Sequence[Event], served: bool = False) -> None:  # noqa: ARG002
        waiting = [event for event in after if not event.query()]
        if waiting:
            self._releasing.append(_Release(lease.digest, waiting))
        else:
            self._drop_lease(lease.digest)

    def ready(self, digest: str) -> bool:
        slot = self.device.get(digest)
        return slot is not None and slot.ready

    def loaded(self, lease: Lease) -> bool:
        return self.ready(lease.digest)

    def failure(self, lease: Lease) -> LoadFailed | None:
        return self.device[lease.digest].failure

    def source(self, lease: Lease) -> str:  # noqa: ARG002
        """Returns the tier that a leased adapter is loaded from: a slot is filled from host memory."""
        return "host"

    def slot(self, lease: Lease) -> Slot:
        """Returns the leased adapter's slot."""
        return self.device[lease.digest]

    def on_device(self, digest: str) -> bool:
        return digest in self.device

    def fits_without(self, adapter: Adapter, evicted: Collection[str]) -> bool:
        """Returns whether a slot would be free without the idle adapters and those in `evicted`."""
        if self._free or any(slot.idle and slot.adapter.digest not in self._pinned for slot in self.device.values()):
            return True
        return any(digest in self.device and digest != adapter.digest for digest in evicted)

    def choose_spared(self, adapter: Adapter, digests: Iterable[str]) -> Container[str]:  # noqa: ARG002
        """Returns those of `digests` that need not be evicted, latest called first, so that one slot can become
        free."""
        idle = {digest for digest, slot in self.device.items() if slot.idle and digest not in self._pinned}
        requested = [digest for digest in digests if digest in idle]
        must_go = 0 if self._free or len(requested) < len(idle) else 1
        return frozenset(requested[: len(requested) - must_go])

    def free_slots(self, desired: int) -> int:
        """Returns the number of free slots. Frees idle ones first, as far as there are fewer than `desired`; their
        adapters stay in host memory."""
        while len(self._free) < desired and self._make_room(()):
            pass
        return len(self._free)

    # --- for prefetches and operators

    def place(self, adapter: Adapter, spared: Container[str] = ()) -> NoRoom | Pending | TooLarge | LoadFailed | None:
        placed = self._place(adapter, spared)
        return None if isinstance(placed, Slot) else placed

    @property
    def urgent_loads(self) -> bool:
        loading = any(not slot.ready and slot.failure is None and slot.leases for slot in self.device.values())
        return loading or any(not self.ready(digest) for digest in self.hosts.awaited())

    def expect(self, chances: Mapping[str, float]) -> None:
        self.demand.expect(chances)

    def pin(self, device: Iterable[str], host: Iterable[str] = ()) -> None:
        self._pinned, self.hosts.pinned = frozenset(device), frozenset(host)

    def discard(self, digest: str) -> bool:
        slot = self.device.get(digest)
        if slot is None or not slot.idle:
            return False
        self._evict(slot)
        return True

    def states(self) -> AdapterStates:
        on_device = [
            AdapterState(
                digest=digest,
                tier=self.tier(digest),
                bytes=self.limits.bytes,
                in_use=slot.leases,
                waiting=self.hosts.waiting(digest),
                ranks=list(slot.ranks),
                layers=[],
            )
            for digest, slot in self.device.items()
        ]
        folders = [folder for folder in self.hosts.all() if folder.digest not in self.device]
        in_host = [
            AdapterState(
                digest=folder.digest,
                tier="host" if folder.complete else folder.origin,
                bytes=folder.size,
                waiting=self.hosts.waiting(folder.digest),
                ranks=list(folder.adapter.ranks),
                layers=[],
            )
            for folder in folders
        ]
        in_memory = on_device + in_host
        cached = on_disk_alone(self.hosts.cache, {state.digest for state in in_memory})
        on_disk = [AdapterState(digest, "disk", size) for digest, size in cached]
        return AdapterStates(in_memory + on_disk[:MAX_LISTED], max(0, len(on_disk) - MAX_LISTED))

    def tier(self, digest: str) -> HeldTier:
        if self.ready(digest):
            return "device"
        folder = self.hosts.get(digest)
        return "host" if folder is not None and folder.complete else tier_below(self.hosts.cache, digest)

    def evict(self, digest: str) -> bool:
        slot, folder = self.device.get(digest), self.hosts.get(digest)
        if slot is not None and not slot.idle:
            raise InUse(f"{slot.leases} requests use it" if slot.leases else "it is being loaded")
        if self.hosts.waiting(digest):
            raise InUse(f"{self.hosts.waiting(digest)} requests wait for it")
        if folder is not None and folder.in_use:
            raise InUse("it is being loaded")
        if slot is not None:
            self._evict(slot)
        self.hosts.drop(digest)
        on_disk = self.hosts.cache is not None and self.hosts.cache.remove(digest)
        return slot is not None or folder is not None or on_disk

    # --- once per iteration, and for reports

    def poll(self) -> None:
        releasing, self._releasing = self._releasing, []
        for each in releasing:
            self.release(Lease(each.digest, -1, ()), each.after)
        self.hosts.poll()

    def record_load(self, number: int, failure: str) -> None:
        """Records the end of a load into a slot; `failure` is empty if the adapter is there."""
        slot = next((each for each in self.device.values() if each.number == number), None)
        if slot is None:
            return
        slot.folder.holds -= 1
        slot.arrived = time.monotonic()
        if failure:
            slot.failure = LoadFailed(failure)
            if slot.idle:
                self._evict(slot)
        else:
            slot.ready = True

    def close(self) -> None:
        self.hosts.close()

    def residents(self) -> list[Resident]:
        on_device = [Resident(d, "device", self.limits.bytes, s.leases) for d, s in self.device.items() if s.ready]
        folders = [f for f in self.hosts.all() if f.complete and not self.ready(f.digest)]
        in_memory = on_device + [Resident(f.digest, "host", f.size, 0) for f in folders]
        cached = on_disk_alone(self.hosts.cache, {resident.digest for resident in in_memory})
        return in_memory + [Resident(digest, "disk", size, 0) for digest, size in cached[:MAX_REPORTED]]

    @property
    def largest(self) -> int:
        return self.hosts.memory

    @property
    def free_bytes(self) -> int:
        idle = sum(slot.idle for slot in self.device.values())
        return (len(self._free) + idle) * self.limits.bytes

    @property
    def loading_bytes(self) -> int:
        slots = [s for s in self.device.values() if not s.ready and s.failure is None and s.leases]
        awaited = [d for d in self.hosts.awaited() if d not in self.device]
        folders = [folder for digest in awaited if (folder := self.hosts.get(digest)) is not None]
        return sum(slot.folder.size for slot in slots) + sum(f.size for f in folders if not f.failed)

    # --- inside

    def _place(self, adapter: Adapter, spared: Container[str]) -> Slot | NoRoom | Pending | TooLarge | LoadFailed:
        """Gives the adapter a slot and starts its load. Returns the reason when it can't."""
        if adapter.max_rank > self.limits.max_rank:
            return LoadFailed(f"its rank {adapter.max_rank} is above max_lora_rank {self.limits.max_rank}")
        folder = self.hosts.load(adapter)
        if folder.failed:
            return Pending() if folder.abandoned or folder.failure is None else folder.failure
        if folder.size > self.largest:
            self.hosts.drop(adapter.digest)
            return TooLarge(folder.size, self.largest)
        if not folder.complete:
            return Pending()
        if not self._free and not self._make_room(spared):
            return NoRoom()
        self._number += 1
        slot = Slot(adapter, self._free.pop(), self._number, folder, time.monotonic())
        folder.holds += 1
        self.device[adapter.digest] = slot
        self._orders.add(slot)
        return slot

    def _make_room(self, spared: Container[str]) -> bool:
        """Evicts the idle adapter that is least worth its slot. Returns False if there is none."""
        idle = [each for each in self.device.values() if each.idle]
        idle = [each for each in idle if each.adapter.digest not in self._pinned and each.adapter.digest not in spared]
        order = self._eviction.order([self._candidate(each) for each in idle], time.monotonic())
        if not order:
            return False
        self._eviction.record_eviction(order[0])
        self._evict(self.device[order[0]])
        return True

    def _candidate(self, slot: Slot) -> Candidate:
        reload_s = self.hosts.rates.seconds("host", slot.folder.size or self.limits.bytes)
        return Candidate(slot.adapter.digest, 1, reload_s, slot.arrived)

    def _evict(self, slot: Slot) -> None:
        del self.device[slot.adapter.digest]
        self._free.append(slot.index)
        if slot.ready:
            self._orders.remove(slot)

    def _drop_lease(self, digest: str) -> None:
        slot = self.device[digest]
        if slot.leases <= 0:
            raise RuntimeError(f"a lease on {digest} was released twice")
        slot.leases -= 1
        slot.folder.leased = slot.leases > 0
        if slot.failure is not None and slot.idle:
            self._evict(slot)
