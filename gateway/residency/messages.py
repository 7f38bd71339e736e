"""What is said of adapters that are to be warm: light, for the command line imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from cluster.messages import Adapter
from cluster.residency import HeldTier

Tier = Literal["device", "host"]

MAX_COPIES = 16
"""Nodes on which a version may be asked for."""
WARM_SECONDS = 60.0
"""Longest wait for a version to be warm before it takes calls."""


class Version(NamedTuple):
    """A version that is to be warm."""

    number: int
    adapter: Adapter


class WarmOrder(NamedTuple):
    """Whose versions are to be warm, and where."""

    tenant: str
    function: str
    versions: Sequence[Version]
    tier: Tier = "device"
    copies: int = 1


class WarmPlace(msgspec.Struct, frozen=True):
    """A version on a node."""

    version: int
    node: str
    tier: HeldTier
    """Where it is now; `absent`: it is on its way, unless there is an `error`."""
    error: str | None = None
    """Why the node does not take it."""


class WarmReply(msgspec.Struct, frozen=True):
    """`ready`: all places have the `tier` that was asked for, or a better one."""

    function: str
    tier: Tier
    ready: bool
    places: list[WarmPlace]
