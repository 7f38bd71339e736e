"""Adapter memory of a simulated node, as in `node_agent/adapter_memory`, with LRU eviction.

Memory is counted in bytes. Pages are not modelled, so slightly more adapters fit than on a real node
(docs/design/adapter-memory.md).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from cluster.node_table import ABSENT, DEVICE, HOST


@dataclass(slots=True)
class Entry:
    """An adapter for which device memory is allocated."""

    digest: str
    bytes: int
    leases: int = 0
    ready: bool = False
    is_complete: bool = False


class AdapterMemory:
    def __init__(self, device_bytes: int, host_bytes: int | None, slots: int) -> None:
        """`slots` is the maximum number of adapters on the device.

        With `host_bytes` None all adapters are in host memory from the start.
        """
        self.host_bytes, self._slots = host_bytes, slots
        self.device: OrderedDict[str, Entry] = OrderedDict()
        self.host: OrderedDict[str, int] = OrderedDict()
        self.free = device_bytes
        """device bytes that are unused or occupied by adapters without a lease"""
        self._unused = device_bytes
        self.changed: set[str] = set()
        """digests of adapters whose tier or use may have changed since the set was last cleared"""
        self._host_used = 0

    def tier(self, digest: str) -> int:
        entry = self.device.get(digest)
        if entry is not None and entry.is_complete:
            return DEVICE
        return HOST if self.in_host(digest) else ABSENT

    def leases(self, digest: str) -> int:
        entry = self.device.get(digest)
        return 0 if entry is None else entry.leases

    def in_host(self, digest: str) -> bool:
        return self.host_bytes is None or digest in self.host

    def lease(self, digest: str, size: int) -> Entry | None:
        """Takes a lease on an adapter of `size` bytes, and returns its entry, which may still be loading.

        Returns None if evicting all adapters without a lease would not free enough memory.
        """
        entry = self.device.get(digest)
        if entry is None:
            if size > self.free or not self._make_room(size):
                return None
            entry = self.device[digest] = Entry(digest, size)
            self._unused -= size
            self.free -= size
        elif not entry.leases:
            self.free -= entry.bytes
        entry.leases += 1
        self.device.move_to_end(digest)
        self.changed.add(digest)
        return entry

    def release(self, entry: Entry) -> None:
        entry.leases -= 1
        if not entry.leases:
            self.free += entry.bytes
            self.changed.add(entry.digest)

    def arrived(self, digest: str) -> None:
        """Marks the adapter as complete on the device."""
        entry = self.device[digest]
        entry.ready = entry.is_complete = True
        self.changed.add(digest)

    def keep_in_host(self, digest: str, size: int) -> None:
        """Adds a fetched adapter to host memory. Evicts the least recently used ones if necessary."""
        if self.host_bytes is None:
            return
        while self.host and self._host_used + size > self.host_bytes:
            evicted, freed = self.host.popitem(last=False)
            self._host_used -= freed
            self.changed.add(evicted)
        self.host[digest] = size
        self._host_used += size
        self.changed.add(digest)

    def touch(self, digest: str) -> None:
        if digest in self.host:
            self.host.move_to_end(digest)

    def _make_room(self, size: int) -> bool:
        """Evicts adapters without a lease, least recently used first, until a slot and `size` bytes are free.

        Returns False if that is not possible.
        """
        while self._unused < size or len(self.device) >= self._slots:
            victim = next((entry for entry in self.device.values() if not entry.leases and entry.is_complete), None)
            if victim is None:
                return False
            del self.device[victim.digest]
            self._unused += victim.bytes
            self.changed.add(victim.digest)
        return True
