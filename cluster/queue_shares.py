"""Displacement in a full queue, so that no tenant can lock the others out by filling it."""

from __future__ import annotations

from collections.abc import Collection


def room_for_others(queue_limit: int) -> int:
    """Returns how many places beyond a queue's limit there are, in which requests may be on their way that will take
    another's place."""
    return max(4, queue_limit // 8)


class QueueShares:
    """Counts how many requests of each tenant wait, and finds the tenant that has more than its share."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, float]] = {}
        """requests, and the weight that the last of them had"""

    @property
    def tenants(self) -> Collection[str]:
        return self._waiting.keys()

    def count(self, tenant: str) -> int:
        return self._waiting.get(tenant, (0, 0.0))[0]

    def join(self, tenant: str, weight: float) -> None:
        count, _ = self._waiting.get(tenant, (0, weight))
        self._waiting[tenant] = count + 1, weight

    def leave(self, tenant: str) -> None:
        """Counts one waiting request of the tenant less. Raises KeyError when none of the tenant's waits."""
        count, weight = self._waiting[tenant]
        if count > 1:
            self._waiting[tenant] = count - 1, weight
        else:
            del self._waiting[tenant]

    def tenant_to_displace(self, tenant: str, weight: float) -> str | None:
        """Returns the tenant that has most waiting for its weight, if one more of `tenant` would have still less. None:
        the queue is shared fairly, and the newcomer has to go."""
        if not self._waiting:
            return None
        largest = max(self._waiting, key=self._load)
        mine = (self._waiting.get(tenant, (0, weight))[0] + 1) / weight
        return largest if largest != tenant and mine < self._load(largest) else None

    def _load(self, tenant: str) -> float:
        count, weight = self._waiting[tenant]
        return count / weight
