"""Running loads to the device: their start and end, and which of them give up their room. Only the engine's thread
calls it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from node_agent.adapter_memory.device_room import DeviceRoom, Place
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.loader import Loader
from node_agent.adapter_memory.loads import CopyStates, DeviceAdapter, HostAdapter
from node_agent.adapter_memory.priority import Priority
from node_agent.states import DeviceState

MIN_LOAD_S = 1e-6
"""Load time, in seconds, that is recorded for a prefetch whose copy had already ended when a request took it over."""
SETTLED = {
    DeviceState.COPIED: DeviceState.READY,
    DeviceState.COPY_FAILED: DeviceState.FAILED,
    DeviceState.COPY_STOPPED: DeviceState.ABANDONED,
}
"""State that the engine sets when it records the end of a copy, by the copy's end state."""


class DeviceLoads:
    """Loads of adapters that have pages on the device but are not complete."""

    def __init__(self, loader: Loader, hosts: HostTier, room: DeviceRoom) -> None:
        self._loader, self._hosts, self._room = loader, hosts, room
        self._entries: list[DeviceAdapter] = []

    def begin(self, host: HostAdapter, place: Place, order: Sequence[int] | None) -> DeviceAdapter | None:
        """Assigns the place to the adapter, and starts to copy each layer once it is in host memory. Returns None, with
        the place freed, when the adapter's load has just failed."""
        assert host.layout is not None  # an adapter with a place has a layout
        copy = CopyStates.of(len(host.layout.layers))
        if not self._loader.claim(host, copy):
            self._room.free_unassigned(host.digest, host.layout, place)
            return None
        began = time.monotonic() if host.complete else host.began
        if order is not None:
            self._loader.set_order(copy, order)
        entry = DeviceAdapter(host, host.layout, *place, began, copy)
        entry.prefetched = host.priority > Priority.REQUEST
        self._room.assign(entry)
        self._entries.append(entry)
        self._loader.copy(host, entry.pages, copy)
        return entry

    def poll(self) -> None:
        """Processes loads that have ended. If a load found no room in host memory, cancels less urgent ones."""
        if self._hosts.short is not None:
            self.reclaim(self._hosts.short)
        self._entries = [entry for entry in self._entries if not self._advance(entry)]

    def reclaim(self, priority: Priority) -> bool:
        """Cancels loads that are less urgent than `priority`. Returns whether there were any; their room is free
        soon."""
        less_urgent = [entry for entry in self._entries if entry.host.priority > priority]
        for entry in less_urgent:
            self._loader.abandon(entry.copy)
        return bool(less_urgent)

    def end_unwanted(self, entry: DeviceAdapter) -> None:
        """Cancels the load if nobody wants the adapter, unless it is nearly done."""
        digest = entry.host.digest
        is_wanted = entry.leases or entry.served or digest in self._room.pinned or self._hosts.waiting(digest)
        if not (is_wanted or entry.settled or entry.host.nearly_done):
            self._loader.abandon(entry.copy)

    @property
    def awaited(self) -> list[DeviceAdapter]:
        """Returns the adapters whose loads are not predicted prefetches."""
        return [entry for entry in self._entries if entry.host.priority < Priority.PREDICTED]

    def _advance(self, entry: DeviceAdapter) -> bool:
        """Processes a copy that has ended, successfully or not. Returns False while it runs."""
        host, copy = entry.host, entry.copy
        if not copy.ended:
            return False
        copy.change_state(SETTLED[copy.state])
        if copy.state is DeviceState.READY:
            if entry.began > host.began and not entry.prefetched:  # loaded from host memory alone
                self._hosts.rates.record_load("host", entry.size, copy.arrived - entry.began)
            entry.weights = [views for views in copy.views if views is not None]
            entry.load_seconds = max(MIN_LOAD_S, copy.arrived - entry.began)
            return True
        if not (host.failed or copy.abandoned):
            self._hosts.forget(host)  # the copy failed, not the fetch: the next request reads the store again
        if entry.leases == 0:
            self._room.evict(host.digest)
        return True
