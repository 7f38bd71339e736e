"""Load of an adapter without a request: for operators' prefetches and predicted ones."""

from __future__ import annotations

from collections.abc import Container

from cluster.messages import Adapter
from cluster.residency import HeldTier
from node_agent.adapter_memory.priority import Priority
from node_agent.engine.adapter_tiers import AdapterTiers, DeviceEntry, is_staged
from node_agent.leases import LoadFailed, NoRoom, TooLarge


class PrefetchLoad:
    """Load of an adapter for which no request waits.

    The prefetch counts as a waiter for the adapter, like a queued request, until the adapter is in host memory and
    again during the copy to the device. It never takes a lease: a request may take over the loaded adapter, or its
    room, at any time.
    """

    def __init__(
        self,
        tiers: AdapterTiers,
        adapter: Adapter,
        priority: Priority,
        *,
        to_device: bool = True,
        spared: Container[str] = (),
        tenant: str = "",
    ) -> None:
        """`spared`: digests of adapters that a predicted prefetch must not evict. `tenant`: who ordered the prefetch;
        empty if no tenant did."""
        self._tiers, self.adapter, self._priority = tiers, adapter, priority
        self._to_device, self._spared, self._tenant = to_device, spared, tenant
        self.waits = False
        self._copying: DeviceEntry | None = None
        self.was_staged = is_staged(tiers, adapter.digest)
        """whether the adapter was completely in host memory at the start"""
        self._wait()

    def advance(self, may_place: bool) -> HeldTier | TooLarge | LoadFailed | None:
        """Advances the load as far as possible. `may_place`: whether it may use room on the device. Returns None while
        the load runs. At its end, returns the tier reached, or the reason of a permanent failure."""
        outcome = self._advance(may_place)
        if outcome is not None:
            self.end()
        return outcome

    def end(self) -> None:
        """Ends the prefetch's wait for the adapter. May be called repeatedly."""
        if self.waits:
            self.waits = False
            self._tiers.retract(self.adapter.digest, self._priority)

    @property
    def progress(self) -> float:
        """Returns the share, 0 to 1, of the adapter's bytes that have arrived from the store. If it was in host memory
        at the start, returns the share on the device."""
        if self.was_staged:
            entry = self._tiers.device.get(self.adapter.digest)
            return entry.copied if entry is not None else 0.0
        host = self._tiers.hosts.get(self.adapter.digest)
        return host.fetched if host is not None else 0.0

    def _advance(self, may_place: bool) -> HeldTier | TooLarge | LoadFailed | None:
        tiers, digest = self._tiers, self.adapter.digest
        if tiers.ready(digest):
            return "device"
        entry = tiers.device.get(digest)
        self._copying = entry or self._copying
        if self._copying is not None and self._copying.failure is not None:
            return self._copying.failure
        if entry is not None:
            return None
        if not is_staged(tiers, digest):
            self._wait()
            host = tiers.hosts.load(self.adapter)
            if host.failed:  # an abandoned load is started again at the next call
                return None if host.abandoned else host.failure
            if host.size > tiers.largest:
                tiers.hosts.drop(digest)
                return TooLarge(host.size, tiers.largest)
            return None
        if not self._to_device:
            return "host"
        if not may_place:
            self.end()  # its bytes must not block those of requests that have precedence
            return None
        return self._place()

    def _place(self) -> HeldTier | TooLarge | LoadFailed | None:
        self._wait()
        refusal = self._tiers.place(self.adapter, self._spared)
        if isinstance(refusal, NoRoom):
            return "host"
        return refusal if isinstance(refusal, (TooLarge, LoadFailed)) else None

    def _wait(self) -> None:
        if not self.waits:
            self.waits = True
            self._tiers.announce(self.adapter, self._priority, self._spared, self._tenant)
