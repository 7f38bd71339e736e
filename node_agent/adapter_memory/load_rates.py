"""Moving average of the rates (bytes per second) of recent loads, for each tier that is read. Other traffic on a link
lowers its rate."""

from __future__ import annotations

from cluster.residency import HeldTier

FIRST_RATES: dict[HeldTier, float] = {"host": 4e9, "disk": 1e9, "absent": 200e6}
"""Assumed bytes per second before the first load from a tier: host memory, the node's disk, the object store
("absent")."""
NEWEST = 0.25
"""Weight of the latest load in the moving average, 0 to 1."""


class LoadRates:
    """Rates of loads in bytes per second, by the tier that is read."""

    def __init__(self) -> None:
        self.bytes_per_s = dict(FIRST_RATES)

    def record_load(self, source: HeldTier, size: int, seconds: float) -> None:
        """Updates the rate of the tier `source` with a load of `size` bytes that took `seconds`. Ignores loads of no
        bytes or no duration."""
        if size > 0 and seconds > 0:
            self.bytes_per_s[source] += (size / seconds - self.bytes_per_s[source]) * NEWEST

    def seconds(self, source: HeldTier, size: int) -> float:
        """Returns the expected seconds for `size` bytes from `source`: from disk or store to host memory, or from host
        memory to the device."""
        return size / self.bytes_per_s[source]
