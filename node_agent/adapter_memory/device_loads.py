"""Loads to the device that are under way: their beginning, their end, and which of them yield their room.

Called by the engine's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from node_agent.adapter_memory.device_room import DeviceRoom, Place
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.loader import Loader
from node_agent.adapter_memory.loader_threads import Priority
from node_agent.adapter_memory.loads import CopyStates, DeviceAdapter, HostAdapter
from node_agent.states import DeviceState

MIN_LOAD_S = 1e-6
"""Duration of a load that had ended, unnoticed yet, when a request took it over from a prefetch."""
SETTLED = {
    DeviceState.COPIED: DeviceState.READY,
    DeviceState.COPY_FAILED: DeviceState.FAILED,
    DeviceState.COPY_STOPPED: DeviceState.ABANDONED,
}
"""The states that the engine gives to copies that have ended."""


class DeviceLoads:
    """The adapters that have room on the device and are not wholly there yet."""

    def __init__(self, loader: Loader, hosts: HostTier, room: DeviceRoom) -> None:
        self._loader, self._hosts, self._room = loader, hosts, room
        self._entries: list[DeviceAdapter] = []

    def begin(self, host: HostAdapter, place: Place, order: Sequence[int] | None) -> DeviceAdapter | None:
        """Moves the adapter in and starts to copy it, each layer once it is in host memory. Returns None when its load
        ended badly a moment ago, and the place is free again."""
        assert host.layout is not None  # it has a place
        copy = CopyStates.of(len(host.layout.layers))
        if not self._loader.claim(host, copy):
            self._room.give(host.digest, host.layout, place)
            return None
        began = time.monotonic() if host.complete else host.began
        if order is not None:
            self._loader.set_order(copy, order)
        entry = DeviceAdapter(host, host.layout, *place, began, copy)
        entry.prefetched = host.priority > Priority.REQUEST
        self._room.move_in(entry)
        self._entries.append(entry)
        self._loader.copy(host, entry.pages, copy)
        return entry

    def poll(self) -> None:
        """Notes which loads have ended; those that find no room in host memory take it from less urgent ones."""
        if self._hosts.short is not None:
            self.reclaim(self._hosts.short)
        self._entries = [entry for entry in self._entries if not self._advance(entry)]

    def reclaim(self, priority: Priority) -> bool:
        """Ends loads that are less urgent than `priority`. Returns whether there are any: their room is free soon."""
        less_urgent = [entry for entry in self._entries if entry.host.priority > priority]
        for entry in less_urgent:
            self._loader.abandon(entry.copy)
        return bool(less_urgent)

    def end_unwanted(self, entry: DeviceAdapter) -> None:
        """Ends the load if nobody wants the adapter and much of it has still to come from the store."""
        digest = entry.host.digest
        is_wanted = entry.leases or entry.served or digest in self._room.pinned or self._hosts.waiting(digest)
        if not (is_wanted or entry.settled or entry.host.nearly_done):
            self._loader.abandon(entry.copy)

    @property
    def awaited(self) -> list[DeviceAdapter]:
        """Returns the adapters whose loads are not predicted prefetches: those step back for any other."""
        return [entry for entry in self._entries if entry.host.priority < Priority.PREDICTED]

    def _advance(self, entry: DeviceAdapter) -> bool:
        """Takes note of a copy that has ended, well or not. Returns False while it runs."""
        host, copy = entry.host, entry.copy
        if not copy.ended:
            return False
        copy.change_state(SETTLED[copy.state])
        if copy.state is DeviceState.READY:
            if entry.began > host.began and not entry.prefetched:  # from host memory alone
                self._hosts.rates.record_load("host", entry.size, copy.arrived - entry.began)
            entry.weights = [views for views in copy.views if views is not None]
            entry.load_seconds = max(MIN_LOAD_S, copy.arrived - entry.began)
            return True
        if not (host.failed or copy.abandoned):
            self._hosts.forget(host)  # the copy failed: the next request reads the store again
        if entry.leases == 0:
            self._room.evict(host.digest)
        return True
