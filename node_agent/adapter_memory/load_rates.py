"""Rates of the latest loads, by the tier that they read from. A loaded link shows as a slow one."""

from __future__ import annotations

from cluster.residency import HeldTier

FIRST_RATES: dict[HeldTier, float] = {"host": 4e9, "disk": 1e9, "absent": 200e6}
"""Bytes per second that a load is taken to bring, before one has been seen, from host memory, the node's disk or the
object store."""
NEWEST = 0.25
"""Weight of the latest load."""


class LoadRates:
    def __init__(self) -> None:
        self.bytes_per_s = dict(FIRST_RATES)

    def record_load(self, source: HeldTier, size: int, seconds: float) -> None:
        """Takes in that a load of `size` bytes has ended after `seconds`. One that took no time says nothing."""
        if size > 0 and seconds > 0:
            self.bytes_per_s[source] += (size / seconds - self.bytes_per_s[source]) * NEWEST

    def seconds(self, source: HeldTier, size: int) -> float:
        """Returns how long `size` bytes take from `source` to the tier above it, the disk and the store being below the
        host's memory."""
        return size / self.bytes_per_s[source]
