"""How well adapter memory is used."""

from __future__ import annotations

from dataclasses import dataclass

from node_agent.adapter_memory.store import AdapterStore


@dataclass(frozen=True)
class Usage:
    """Of one tier."""

    pool_bytes: int
    page_bytes: int
    adapters: int
    live_bytes: int
    """Weights of the adapters there, without padding."""
    taken_bytes: int
    """Pages that they take."""
    pages: dict[str, int]
    """By state. Device: free, arriving, idle, in_use (leased), pinned (and not leased). Host: free, arriving, ready,
    leaving."""

    @property
    def utilisation(self) -> float:
        """Live bytes / pool."""
        return self.live_bytes / self.pool_bytes if self.pool_bytes else 0.0

    @property
    def fragmentation(self) -> float:
        """Share of the taken bytes that hold no weights."""
        return 1 - self.live_bytes / self.taken_bytes if self.taken_bytes else 0.0

    @property
    def adapters_per_gib(self) -> float:
        return self.adapters / (self.pool_bytes / (1 << 30)) if self.pool_bytes else 0.0


def device_usage(store: AdapterStore) -> Usage:
    pages = dict.fromkeys(("free", "arriving", "idle", "in_use", "pinned"), 0)
    pages["free"] = store.pool.pages.free
    for digest, entry in store.device.items():
        state = "idle"
        if entry.weights is None:
            state = "arriving"
        elif entry.leases:
            state = "in_use"
        elif digest in store.room.pinned:
            state = "pinned"
        pages[state] += len(entry.pages)
    live = sum(entry.layout.live for entry in store.device.values())
    taken = sum(entry.size for entry in store.device.values())
    return Usage(store.pool.size, store.pool.page_size, len(store.device), live, taken, pages)


def host_usage(store: AdapterStore) -> Usage:
    pages = dict.fromkeys(("free", "arriving", "ready", "leaving"), 0)
    pool = store.hosts.pool
    pages["free"] = pool.pages.free
    live = taken = adapters = 0
    for host in (host for same in store.hosts.owned().values() for host in same):
        here = store.hosts.get(host.digest) is host
        state = "leaving" if not here else "ready" if host.complete else "arriving"
        pages[state] += len(host.pages or ())
        assert host.layout is not None  # it has pages
        live, taken, adapters = live + host.layout.live, taken + host.size, adapters + 1
    return Usage(pool.size, pool.page_size, adapters, live, taken, pages)
