"""The interface by which queue, admission and prefetching use an engine's adapter memory.

An engine has two tiers of adapter memory: the device, where adapters are used, and host memory below it. Both engines
of a node (docs/operate/engines.md) provide this interface; none of its methods blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Protocol

from cluster.messages import Adapter
from cluster.news import Resident
from cluster.residency import AdapterStates, HeldTier
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.priority import Priority
from node_agent.device_event import Event
from node_agent.leases import Lease, LoadFailed, NoRoom, Pending, TooLarge


class DeviceEntry(Protocol):
    """Adapter that has room on the device, loaded or not."""

    @property
    def idle(self) -> bool:
        """Returns whether the adapter has no lease and its load to the device has ended."""

    @property
    def copied(self) -> float:
        """Returns the share of the adapter's bytes that is on the device, 0 to 1."""

    @property
    def failure(self) -> LoadFailed | None:
        """Returns why the adapter's load failed. Returns None if it has not failed, or was abandoned because nobody
        wanted the adapter."""

    @property
    def arrived(self) -> float:
        """Returns the `time.monotonic()` at which the adapter's load to the device ended; 0 if it has not ended."""


class HostEntry(Protocol):
    """Adapter in host memory, or on its way there."""

    @property
    def complete(self) -> bool:
        """Returns whether the whole adapter is in host memory and was verified."""

    @property
    def failed(self) -> bool:
        """Returns whether the adapter's load ended early: it failed, or was abandoned."""

    @property
    def abandoned(self) -> bool:
        """Returns whether the adapter's load was abandoned because nobody wanted the adapter. The next `load` starts
        again."""

    @property
    def failure(self) -> LoadFailed | None:
        """Returns why the adapter's load ended early; None if it did not."""

    @property
    def fetched(self) -> float:
        """Returns the share of the adapter's bytes that is in host memory, 0 to 1."""

    @property
    def size(self) -> int:
        """Returns the adapter's bytes in host memory; 0 while they are unknown."""

    @property
    def in_use(self) -> bool:
        """Returns whether the adapter's bytes are still being read or written, so that they must stay."""

    @property
    def arrived(self) -> float:
        """Returns the `time.monotonic()` at which the adapter's load to host memory ended; 0 if it has not ended."""


class HostEntries(Protocol):
    """The adapters in host memory."""

    def get(self, digest: str) -> HostEntry | None:
        """Returns the adapter; None if it is neither in host memory nor on its way there."""

    def load(self, adapter: Adapter) -> HostEntry:
        """Returns the adapter. Starts its load unless it is running, complete, or failed a moment ago."""

    def drop(self, digest: str) -> None:
        """Removes the adapter, if it is there. Its memory becomes free once nothing uses it."""

    def waiting(self, digest: str) -> int:
        """Returns the number of requests and prefetches that wait for the adapter."""

    def lacks_room(self, digest: str) -> bool:
        """Returns whether the adapter's load waits for room in host memory."""


class AdapterTiers(Protocol):
    """Adapters on the device and in host memory. One thread calls all methods."""

    demand: Demand
    adapter_memory: int
    """bytes for adapters on the device"""

    @property
    def device(self) -> Mapping[str, DeviceEntry]:
        """Returns the adapters that have room on the device, by digest."""

    @property
    def hosts(self) -> HostEntries:
        """Returns the adapters in host memory."""

    @property
    def largest(self) -> int:
        """Returns the maximum bytes of one adapter."""

    # --- for requests

    def announce(
        self, adapter: Adapter, priority: Priority = ..., spared: Container[str] = (), tenant: str = ""
    ) -> str:
        """Adds a request or prefetch that waits for the adapter, and starts the adapter's load.

        Returns the adapter's tier: host, disk or absent; none if it is already on the device. The caller must call
        `retract` once per call. `spared`: digests that a predicted prefetch must not evict. `tenant`: for whom the
        adapter is loaded; empty for no tenant.
        """

    def retract(self, digest: str, priority: Priority = ...) -> None:
        """Removes a request or prefetch that waits for the adapter."""

    def acquire(
        self, adapter: Adapter, *, spared: Container[str] = ()
    ) -> Lease | NoRoom | Pending | TooLarge | LoadFailed:
        """Returns a lease on the adapter, or the temporary or permanent reason for refusal. `spared`: digests that must
        not be evicted for it."""

    def release(self, lease: Lease, after: Sequence[Event], served: bool = False) -> None:
        """Ends the lease once all events in `after` have ended. With `served`, a running load continues."""

    def ready(self, digest: str) -> bool:
        """Returns whether the whole adapter is on the device."""

    def loaded(self, lease: Lease) -> bool:
        """Returns whether the whole leased adapter is on the device."""

    def failure(self, lease: Lease) -> LoadFailed | None:
        """Returns why the adapter's load failed; None if it has not failed."""

    def source(self, lease: Lease) -> str:
        """Returns the tier that a leased adapter is loaded from: host, disk or absent."""

    def on_device(self, digest: str) -> bool:
        """Returns whether the adapter has room on the device, loaded or not."""

    def fits_without(self, adapter: Adapter, evicted: Collection[str]) -> bool:
        """Returns whether the adapter would fit on the device without the idle adapters and those in `evicted`."""

    def choose_spared(self, adapter: Adapter, digests: Iterable[str]) -> Container[str]:
        """Returns those of `digests` that need not be evicted for the adapter."""

    # --- for prefetches and operators

    def place(self, adapter: Adapter, spared: Container[str] = ()) -> NoRoom | Pending | TooLarge | LoadFailed | None:
        """Starts to bring an adapter from host memory to the device, without a lease. Returns None on success, else the
        reason."""

    @property
    def urgent_loads(self) -> bool:
        """Returns whether a request or an operator's prefetch waits for a load."""

    def expect(self, chances: Mapping[str, float]) -> None:
        """Replaces the forecast: the probability, by digest, of a call within 30 s."""

    def pin(self, device: Iterable[str], host: Iterable[str] = ()) -> None:
        """Replaces the adapters that stay on the device, and in host memory, once loaded."""

    def discard(self, digest: str) -> bool:
        """Evicts an idle adapter from the device. Returns False when it is in use or not there."""

    def states(self) -> AdapterStates:
        """Returns the state of each adapter, for operators."""

    def tier(self, digest: str) -> HeldTier:
        """Returns the highest tier with the complete adapter."""

    def evict(self, digest: str) -> bool:
        """Evicts the adapter from all tiers. Returns False when it is in none. Raises InUse."""

    # --- once per iteration, and for reports

    def poll(self) -> None:
        """Processes arrivals and ends of leases."""

    def close(self) -> None:
        """Frees the memory and ends the threads."""

    def residents(self) -> list[Resident]:
        """Returns the adapters by their highest tier."""

    @property
    def free_bytes(self) -> int:
        """Returns the bytes of the device that are free, or used by idle adapters."""

    @property
    def loading_bytes(self) -> int:
        """Returns the bytes that still have to reach the device for running loads and queued requests."""


def is_staged(tiers: AdapterTiers, digest: str) -> bool:
    """Returns whether the adapter is completely in host memory."""
    host = tiers.hosts.get(digest)
    return host is not None and host.complete
