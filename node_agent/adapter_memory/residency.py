"""Operators' view of adapters: the state of each, and eviction on request. Called by the engine's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cluster.residency import AdapterState, AdapterStates, HeldTier, LayerName
from node_agent.adapter_memory.disk_cache import MAX_LISTED, DiskCache, on_disk_alone, tier_below
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.loads import DeviceAdapter, HostAdapter
from node_agent.leases import InUse, LayerState

STATE_NAMES: dict[int, LayerName] = {
    LayerState.NO: "no",
    LayerState.HOST: "host",
    LayerState.ENQUEUED: "enqueued",
    LayerState.DEVICE: "device",
    LayerState.FAILED: "failed",
}


class Tiers(Protocol):
    """Adapters of all tiers."""

    device: Mapping[str, DeviceAdapter]
    hosts: HostTier
    cache: DiskCache | None

    def ready(self, digest: str) -> bool:
        """Returns whether all layers of the adapter are on the device."""

    def discard(self, digest: str) -> bool:
        """Evicts an idle adapter from the device. Returns False when it is in use or not there."""


def adapter_states(store: Tiers) -> AdapterStates:
    """Returns the states of adapters on the device first, then in host memory or loading, then on disk. Each is listed
    once."""
    in_memory = [_on_device(store, entry) for entry in store.device.values()]
    in_memory += [_in_host(host) for host in store.hosts.all() if host.digest not in store.device]
    digests = {state.digest for state in in_memory}
    on_disk = [AdapterState(digest, "disk", size) for digest, size in on_disk_alone(store.cache, digests)]
    return AdapterStates(in_memory + on_disk[:MAX_LISTED], max(0, len(on_disk) - MAX_LISTED))


def tier_of(store: Tiers, digest: str) -> HeldTier:
    """Returns the highest tier with the complete adapter: device, host or disk; absent when none has it."""
    if store.ready(digest):
        return "device"
    host = store.hosts.get(digest)
    if host is not None and host.complete:
        return "host"
    return tier_below(store.cache, digest)


def evict(store: Tiers, digest: str) -> bool:
    """Evicts the adapter from device, host memory and disk. Returns False when it is in none of them.

    Raises InUse while a request leases or awaits it, CPU workers read it, or its load runs.
    """
    entry, host = store.device.get(digest), store.hosts.get(digest)
    if entry is not None and not entry.idle:
        raise InUse(f"{entry.leases} requests use it" if entry.leases else "it is being loaded")
    if store.hosts.waiting(digest):
        raise InUse(f"{store.hosts.waiting(digest)} requests wait for it")
    if host is not None and host.in_use:
        raise InUse("CPU workers read it" if host.holds else "it is being loaded")
    if host is not None:
        store.hosts.forget(host)
    on_disk = store.cache is not None and store.cache.remove(digest)
    return store.discard(digest) or host is not None or on_disk


def _on_device(store: Tiers, entry: DeviceAdapter) -> AdapterState:
    host, copy = entry.host, entry.copy
    return AdapterState(
        digest=host.digest,
        tier=tier_of(store, host.digest),
        bytes=entry.size,
        in_use=entry.leases,
        waiting=store.hosts.waiting(host.digest),
        ranks=list(entry.layout.ranks),
        layers=_layer_names(copy.layers, host.here, copy.failure is not None) if entry.weights is None else [],
    )


def _in_host(host: HostAdapter) -> AdapterState:
    there, here = host.complete, host.here
    return AdapterState(
        digest=host.digest,
        tier="host" if there else host.origin,
        bytes=host.size,
        waiting=host.waiters,
        ranks=list(host.layout.ranks) if host.layout else [],
        layers=[] if there else _layer_names([LayerState.NO] * len(here), here, host.failed),
    )


def _layer_names(states: Sequence[int], in_host: Sequence[int], failed: bool) -> list[LayerName]:
    both = zip(states, in_host, strict=True)
    tiers = (LayerState.HOST if state == LayerState.NO and here else state for state, here in both)
    return [STATE_NAMES[LayerState.FAILED if failed else state] for state in tiers]
