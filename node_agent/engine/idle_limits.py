"""Evicts adapters that were idle for longer than their functions' policies allow: first from the device, and after
twice that time from host memory.

Adapters that the node should have (a provisioned copy, a warm window) stay. Files on the disk stay too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from cluster.residency import WantedResidency
from node_agent.engine.adapter_tiers import AdapterTiers, DeviceEntry, HostEntry

LOOK_INTERVAL_S = 0.5
MAX_ORDER_S = 600.0
"""Maximum seconds for which the gateway's message with limits is valid."""


class IdleLimits:
    """Idle limits of adapters, which the gateway sets. Only the engine's thread calls it. `is_wanted` returns whether
    the adapter with a digest must stay."""

    def __init__(
        self, tiers: AdapterTiers, is_wanted: Callable[[str], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tiers, self._is_wanted, self._clock = tiers, is_wanted, clock
        self._ttls_s: Mapping[str, float] = {}
        self._until = 0.0
        self._look_at = 0.0
        self._used: dict[str, float] = {}
        """Time of the last use or hint of each adapter with a limit, by digest, in monotonic seconds."""

    def set(self, residency: WantedResidency) -> None:
        """Replaces all limits."""
        self._ttls_s = residency.idle_ttls
        self._until = self._clock() + min(residency.seconds, MAX_ORDER_S)
        self._used = {digest: at for digest, at in self._used.items() if digest in self._ttls_s}

    def clear(self) -> None:
        """Removes all limits."""
        self._ttls_s, self._used = {}, {}

    def poll(self) -> None:
        """Evicts the adapters that have been idle for longer than their limits."""
        now = self._clock()
        if now < self._look_at or not self._ttls_s:
            return
        self._look_at = now + LOOK_INTERVAL_S
        if now >= self._until:
            self.clear()
        for digest, seconds in self._ttls_s.items():
            self._expire(digest, seconds, now)

    def _expire(self, digest: str, seconds: float, now: float) -> None:
        entry, host = self._tiers.device.get(digest), self._tiers.hosts.get(digest)
        if entry is None and host is None:
            self._used.pop(digest, None)
            return
        in_use = entry is not None and not entry.idle
        if in_use or self._tiers.hosts.waiting(digest) or self._is_wanted(digest):
            self._used[digest] = now
            return
        idle = now - max(self._used.get(digest, 0.0), self._tiers.demand.last_call(digest), _arrived(entry, host))
        if entry is not None and idle >= seconds:
            self._tiers.discard(digest)
        if host is not None and host.complete and not host.in_use and idle >= 2 * seconds:
            self._tiers.hosts.drop(digest)


def _arrived(entry: DeviceEntry | None, host: HostEntry | None) -> float:
    """Returns the time at which the adapter was completely loaded to its tier, in monotonic seconds; 0 if it is
    incomplete."""
    return max(entry.arrived if entry is not None else 0.0, host.arrived if host is not None else 0.0)
