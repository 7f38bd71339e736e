"""Driver of local pools: it records the size next to Terraform's state, and applies it by Terraform.

A pool that shrinks loses its last nodes. They are drained first, for as many rounds as that takes, and get requests
again if the pool is to keep its size after all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from infra.autoscale.driver import Deferred, PoolSize, check_bounds
from infra.autoscale.sizes import SetSize, read_sizes, set_size
from infra.errors import InfraError, Unchanged
from infra.stack import Pool, Stack, node_ids, pool_of

DRAIN_SECONDS = 3620.0
"""Time after which a node ends even with open requests; longer than any call.

Terraform would wait for these requests, and no round reads the load meanwhile.
"""


class Host(Protocol):
    """The host of the local pools. All methods may raise InfraError."""

    directory: Path

    def stack(self) -> Stack:
        """Returns the stack by the present service file and sizes."""
        ...

    def running(self) -> Collection[str]:
        """Returns the ids of the nodes whose process lives."""
        ...

    def failed(self) -> Collection[str]:
        """Returns the ids of the nodes, of any pool, whose GPU has failed and whose last request has ended."""
        ...

    def open_requests(self) -> Mapping[str, int]:
        """Returns the number of open requests of each node that the gateway knows, by the node's id."""
        ...

    def drain(self, node: str, draining: bool) -> None:
        """Drains the node, or lets it serve again; does nothing if there is no such node."""
        ...

    def apply(self) -> None:
        """Applies the stack's numbers of nodes. Raises Unchanged if it failed before anything was changed."""
        ...


class LocalDriver:
    """Sizes the local pools of a host. `clock` is monotonic seconds."""

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self._host, self._clock = host, clock
        self._drained_at: dict[str, float] = {}

    def size(self, pool: str) -> PoolSize:
        return self._observe(pool)[0]

    def set_desired(self, pool: str, size: int) -> None:
        """Brings the pool to `size` nodes and records that size; nodes that are to end are drained first.

        Raises Deferred while these have open requests. Raises Unchanged, with the old size recorded, if nothing was
        changed.
        """
        (current, live, failed), entry, nodes = self._observe(pool), self._pool(pool), _nodes(pool, size)
        check_bounds(pool, size, current)
        if size == current.desired and current.settled:
            return
        noted = self._recorded_size(pool, entry)
        self._undrain(set(noted.draining) & nodes)
        going = sorted(live - nodes)
        if going:
            set_size(self._host.directory, pool, SetSize(entry.desired, noted.stated, going))
            self._drain(going)
        set_size(self._host.directory, pool, SetSize(size, noted.stated, going))
        try:
            if live != nodes or failed:
                self._host.apply()
        except Unchanged:
            set_size(self._host.directory, pool, SetSize(entry.desired, noted.stated, going))
            raise
        set_size(self._host.directory, pool, SetSize(size, noted.stated))

    def _drain(self, nodes: Collection[str]) -> None:
        now = self._clock()
        for node in nodes:
            if node not in self._drained_at:
                self._host.drain(node, True)
                self._drained_at[node] = now
        counts = self._host.open_requests()
        busy = [node for node in sorted(nodes) if counts.get(node) and now - self._drained_at[node] < DRAIN_SECONDS]
        if busy:
            raise Deferred(f"requests are open on {', '.join(busy)}, which will go")

    def _undrain(self, nodes: Collection[str]) -> None:
        for node in sorted(nodes):
            self._host.drain(node, False)
            self._drained_at.pop(node, None)

    def _pool(self, pool: str) -> Pool:
        for entry in self._host.stack().local_pools:
            if entry.name == pool:
                return entry
        raise InfraError(f"node_pools.{pool}: the service file has no such local pool any more")

    def _recorded_size(self, pool: str, entry: Pool) -> SetSize:
        stated = entry.desired if entry.stated is None else entry.stated
        recorded = read_sizes(self._host.directory).get(pool)
        return SetSize(entry.desired, stated, recorded.draining if recorded is not None else [])

    def _observe(self, pool: str) -> tuple[PoolSize, set[str], set[str]]:
        """Returns the size, the nodes whose process lives, and those with a failed GPU."""
        entry, live = self._pool(pool), self._live(pool)
        failed = live.intersection(self._host.failed()) if live else set[str]()
        settled = live == _nodes(pool, entry.desired) and not (failed or self._recorded_size(pool, entry).draining)
        size = PoolSize(min=entry.min, desired=entry.desired, max=entry.max, live=len(live - failed), settled=settled)
        return size, live, failed

    def _live(self, pool: str) -> set[str]:
        live = {node for node in self._host.running() if pool_of(node) == pool}
        for node in set(self._drained_at) - live:
            if pool_of(node) == pool:
                del self._drained_at[node]
        return live


def _nodes(pool: str, size: int) -> set[str]:
    return set(node_ids(pool, size))
