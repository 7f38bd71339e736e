"""Displacement of requests in a full queue, so that no tenant can lock the others out by filling it."""

from __future__ import annotations

from collections.abc import Collection


def room_for_others(queue_limit: int) -> int:
    """Returns the number of requests that may be on their way to a node beyond its `queue_limit`. Each of them will
    displace a queued request."""
    return max(4, queue_limit // 8)


class QueueShares:
    """Counts the waiting requests of each tenant, and finds the tenant that exceeds its share."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, float]] = {}
        """Waiting requests of each tenant, and the weight of the last one to join."""

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with waiting requests."""
        return self._waiting.keys()

    def count(self, tenant: str) -> int:
        """Returns the number of waiting requests of the tenant."""
        return self._waiting.get(tenant, (0, 0.0))[0]

    def join(self, tenant: str, weight: float) -> None:
        """Adds one waiting request of the tenant, whose weight is now `weight`."""
        count, _ = self._waiting.get(tenant, (0, weight))
        self._waiting[tenant] = count + 1, weight

    def leave(self, tenant: str) -> None:
        """Removes one waiting request of the tenant from the count. Raises KeyError when the tenant has none."""
        count, weight = self._waiting[tenant]
        if count > 1:
            self._waiting[tenant] = count - 1, weight
        else:
            del self._waiting[tenant]

    def tenant_to_displace(self, tenant: str, weight: float) -> str | None:
        """Returns the tenant with the most waiting requests per weight. Returns None when that is `tenant` itself, or
        when one more request of `tenant` would bring it to as many per weight. The queue is then shared fairly, and the
        new request is refused."""
        if not self._waiting:
            return None
        largest = max(self._waiting, key=self._load)
        mine = (self._waiting.get(tenant, (0, weight))[0] + 1) / weight
        return largest if largest != tenant and mine < self._load(largest) else None

    def _load(self, tenant: str) -> float:
        count, weight = self._waiting[tenant]
        return count / weight
