"""Driver of local pools. It records the size next to Terraform's state, and applies it with Terraform.

A pool that shrinks loses the nodes with the highest numbers. They are drained first, which may take several rounds. If
a later round decides to keep them, they are undrained.
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
"""Seconds of draining after which a node is ended even if it has open requests; longer than any call.

Before that a node with open requests is not ended: Terraform would wait for these requests, and no round could read the
load meanwhile.
"""


class Host(Protocol):
    """Interface to the host of the local pools. All methods may raise InfraError."""

    directory: Path

    def stack(self) -> Stack:
        """Returns the stack for the current service file and recorded sizes."""
        ...

    def running(self) -> Collection[str]:
        """Returns the ids of the nodes whose process is running."""
        ...

    def failed(self) -> Collection[str]:
        """Returns the ids of nodes of all pools whose GPU has failed and that have no open requests."""
        ...

    def open_requests(self) -> Mapping[str, int]:
        """Returns the number of open requests of each node registered at the gateway, by node id."""
        ...

    def drain(self, node: str, draining: bool) -> None:
        """Drains the node, or undrains it if `draining` is False. Does nothing if there is no such node."""
        ...

    def apply(self) -> None:
        """Creates and ends nodes until their numbers are those of the stack.

        Raises Unchanged for a failure before anything was changed.
        """
        ...


class LocalDriver:
    """PoolDriver for the local pools of a host. `clock` returns monotonic seconds."""

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self._host, self._clock = host, clock
        self._drained_at: dict[str, float] = {}

    def size(self, pool: str) -> PoolSize:
        return self._observe(pool)[0]

    def set_desired(self, pool: str, size: int) -> None:
        """Scales the pool to `size` nodes, after draining the nodes to be ended, and records the size.

        Raises Deferred while the nodes to be ended have open requests; a later call continues. Raises Unchanged if
        applying failed before it changed any node. The recorded size is then the one from before the call.
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
            raise Deferred(f"requests are open on {', '.join(busy)}, which will be removed")

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
        """Returns the pool's size, its nodes whose process is running, and its nodes with a failed GPU."""
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
