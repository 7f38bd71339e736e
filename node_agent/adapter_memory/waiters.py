"""Counts of the requests and prefetches that wait for adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from node_agent.adapter_memory.priority import Priority


class Waiters:
    """Number of waiters of each adapter, by priority."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[Priority]] = {}
        self._tenants: dict[str, str] = {}
        """tenant that requested each awaited adapter last; empty if no tenant did"""

    def add(self, digest: str, priority: Priority, tenant: str = "") -> None:
        self._counts.setdefault(digest, Counter())[priority] += 1
        if tenant or digest not in self._tenants:
            self._tenants[digest] = tenant

    def remove(self, digest: str, priority: Priority) -> None:
        """Removes one waiter. Raises KeyError if nobody waits for the adapter."""
        counts = self._counts[digest]
        counts[priority] -= 1
        if not counts[priority]:
            del counts[priority]
        if not counts:
            del self._counts[digest], self._tenants[digest]

    def count(self, digest: str) -> int:
        """Returns the number of waiters of the adapter."""
        return self._counts[digest].total() if digest in self._counts else 0

    def has(self, digest: str, priority: Priority) -> bool:
        """Returns whether anybody waits for the adapter with this priority."""
        return self._counts.get(digest, Counter())[priority] > 0

    def first_priority(self, digest: str) -> Priority | None:
        """Returns the priority of the adapter's most urgent waiter; None if nobody waits for it."""
        return min(self._counts[digest]) if digest in self._counts else None

    def awaited(self) -> Iterator[str]:
        """Yields the digests that requests or operators' prefetches wait for. Predicted prefetches are left out."""
        return (digest for digest, counts in self._counts.items() if min(counts) < Priority.PREDICTED)

    def last_tenant(self, digest: str) -> str:
        """Returns the tenant that requested the adapter last; empty if no tenant did, or nobody waits for it."""
        return self._tenants.get(digest, "")

    def all(self) -> Iterator[str]:
        """Yields the digests that anybody waits for."""
        return iter(self._counts)
