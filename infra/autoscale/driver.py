"""Interface for reading and setting a pool's size."""

from __future__ import annotations

from typing import Protocol

import msgspec

from infra.errors import InfraError


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    min: int
    desired: int
    max: int
    live: int
    settled: bool = True
    """True if the pool has `desired` units; if False, another `set_desired` with the same size continues the change"""


class Deferred(InfraError):
    """A size can't be read or set at present. The next round tries again.

    The reason is that the driver was called too often, that another change is in progress, or that nodes to be ended
    have open requests.
    """


class PoolDriver(Protocol):
    """Reads and sets the sizes of pools. Calls may block for a limited time, and may raise InfraError."""

    def size(self, pool: str) -> PoolSize: ...

    def set_desired(self, pool: str, size: int) -> None:
        """Scales the pool to `size` nodes, or instances in AWS.

        Raises InfraError for a size outside the pool's bounds.
        """
        ...


def check_bounds(pool: str, size: int, bounds: PoolSize) -> None:
    """Raises InfraError if `size` is outside the bounds of the pool."""
    if not bounds.min <= size <= bounds.max:
        raise InfraError(f"node_pools.{pool}: the size {size} is outside its bounds, {bounds.min} to {bounds.max}")
