"""Leases on adapters, the reasons for which one is refused, and the states of an adapter's layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lease:
    """Right to read an adapter's weights in `slot` until the lease is released."""

    digest: str
    slot: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NoRoom:
    """Temporary refusal of a lease: adapters in use fill the pool or the slots."""


@dataclass(frozen=True)
class Pending:
    """Temporary refusal of a lease. The adapter's header, which gives its size, is still being read, or its load has no
    room yet."""


@dataclass(frozen=True)
class TooLarge:
    """Permanent refusal of a lease: the adapter needs `need` bytes, but the whole pool has only `have`."""

    need: int
    have: int


@dataclass(frozen=True)
class LoadFailed:
    """Failure of a load: the adapter's bytes could not be read, or did not pass the checks."""

    reason: str
    damaged: bool = False
    """whether the registry's artifact is corrupt or missing"""


class LayerState:
    """States of one layer of an adapter while the adapter is loaded, in their usual order."""

    NO, HOST, ENQUEUED, DEVICE, FAILED = range(5)


class InUse(Exception):
    """Raised when an adapter can't be evicted now. The message says why."""
