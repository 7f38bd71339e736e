"""Largest rank of an adapter that a service's nodes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankLimit:
    """Limit of the ranks of an adapter's modules."""

    rank: int
    memory: Mapping[int, str] = field(default_factory=dict)
    """Text about the memory that slots of each rank would take on a node; empty if it is not known."""
