"""An adapter's way up the memory tiers without a request: for operators' prefetches and predicted ones."""

from __future__ import annotations

from collections.abc import Container

from cluster.messages import Adapter
from cluster.residency import HeldTier
from node_agent.adapter_memory.loader_threads import Priority
from node_agent.adapter_memory.loads import DeviceAdapter
from node_agent.adapter_memory.store import AdapterStore
from node_agent.states import HostState
from node_agent.types import LoadFailed, NoRoom, TooLarge


class PrefetchLoad:
    """Load of an adapter without a request. It waits for the adapter as a request in the queue does, until all of it
    lies in host memory, and again while the device copies it. It never leases: a request may take over all that it has
    loaded, or its room, at any time."""

    def __init__(
        self,
        store: AdapterStore,
        adapter: Adapter,
        priority: Priority,
        *,
        to_device: bool = True,
        spared: Container[str] = (),
    ) -> None:
        """`spared`: digests of adapters that are not to be evicted for a predicted one."""
        self._store, self.adapter, self._priority = store, adapter, priority
        self._to_device, self._spared = to_device, spared
        self.waits = False
        self._copying: DeviceAdapter | None = None
        host = store.hosts.get(adapter.digest)
        self.was_staged = host is not None and host.complete
        """all of it lay in host memory when it began"""
        self._wait()

    def advance(self, may_place: bool) -> HeldTier | TooLarge | LoadFailed | None:
        """Advances as far as it can; with `may_place` it may take room on the device. Returns None while it is under
        way. Returns the tier that it has reached, or the reason why it never will, once it has ended."""
        outcome = self._advance(may_place)
        if outcome is not None:
            self.end()
        return outcome

    def end(self) -> None:
        """Nobody wants it any more. It may be called again."""
        if self.waits:
            self.waits = False
            self._store.retract(self.adapter.digest, self._priority)

    @property
    def progress(self) -> float:
        """Returns the share, 0 to 1, of the adapter's bytes that have come: from the store, or to the device where they
        lay in host memory from the start."""
        if self.was_staged:
            entry = self._store.device.get(self.adapter.digest)
            return entry.copied if entry is not None else 0.0
        host = self._store.hosts.get(self.adapter.digest)
        return host.fetched if host is not None else 0.0

    def _advance(self, may_place: bool) -> HeldTier | TooLarge | LoadFailed | None:
        store, digest = self._store, self.adapter.digest
        if store.ready(digest):
            return "device"
        entry = store.device.get(digest)
        self._copying = entry or self._copying
        if self._copying is not None and self._copying.copy.failure is not None and not self._copying.copy.abandoned:
            return self._copying.copy.failure
        if entry is not None:
            return None
        if not self._is_staged():
            self._wait()
            host = store.hosts.load(self.adapter)
            if host.failed:  # one that was given up just now starts again by the next call
                return None if host.state is HostState.ABANDONED else host.failure
            if host.size > store.largest:
                store.hosts.forget(host)
                return TooLarge(host.size, store.largest)
            return None
        if not self._to_device:
            return "host"
        if not may_place:
            self.end()  # its bytes must not keep out those of the requests for which it steps back
            return None
        return self._place()

    def _is_staged(self) -> bool:
        """Returns whether all of it lies in host memory."""
        host = self._store.hosts.get(self.adapter.digest)
        return host is not None and host.complete

    def _place(self) -> HeldTier | TooLarge | LoadFailed | None:
        self._wait()
        refusal = self._store.place(self.adapter, self._spared)
        if isinstance(refusal, NoRoom):
            return "host"
        return refusal if isinstance(refusal, (TooLarge, LoadFailed)) else None

    def _wait(self) -> None:
        if not self.waits:
            self.waits = True
            self._store.announce(self.adapter, self._priority, self._spared)
