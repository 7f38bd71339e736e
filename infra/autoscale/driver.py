"""What an autoscaler acts through: a pool's size, asked for and set."""

from __future__ import annotations

from typing import Protocol

import msgspec

from infra.errors import InfraError


class PoolSize(msgspec.Struct, frozen=True, kw_only=True):
    min: int
    desired: int
    max: int
    live: int
    """Nodes, or instances, that are there now, whether they can serve yet or not."""
    settled: bool = True
    """Whether nothing is left to do for `desired` to be so; else `set_desired` of the same size does it."""


class Deferred(InfraError):
    """A size can't be asked for or set now; the next round tries again.

    The driver was asked too often, another change is under way, or nodes that go have requests open.
    """


class PoolDriver(Protocol):
    """Tells and sets the sizes of pools. Calls may block; every one of them is bounded. They raise InfraError."""

    def size(self, pool: str) -> PoolSize: ...

    def set_desired(self, pool: str, size: int) -> None:
        """Brings about that the pool has `size` nodes or instances. Raises InfraError for a size outside the pool's
        bounds."""
        ...


def check_bounds(pool: str, size: int, known: PoolSize) -> None:
    """Raises InfraError when `size` is outside the bounds of the pool."""
    if not known.min <= size <= known.max:
        raise InfraError(f"node_pools.{pool}: the size {size} is outside its bounds, {known.min} to {known.max}")
