"""Messages about adapters that are to be warm: light, for the command line imports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from cluster.messages import Adapter
from cluster.residency import HeldTier

Tier = Literal["device", "host"]
Cause = Literal["provisioned", "order", "schedule", "forecast"]

MAX_COPIES = 16
"""Nodes on which a version may be asked for."""
WARM_SECONDS = 60.0
"""Longest wait for a version to be warm before it takes calls."""
WATCH_SECONDS = 30.0
"""Seconds for which a new leader watches calls before it believes its forecasts: as long as the horizon that counts."""


class Version(NamedTuple):
    """A version that is to be warm."""

    number: int
    adapter: Adapter


class WarmOrder(NamedTuple):
    """Order to warm versions of a function, and where."""

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
    """Tier where it is now; `absent`: it is on its way, unless there is an `error`."""
    error: str | None = None
    """Reason for which the node does not take it."""


class WantedPlace(msgspec.Struct, frozen=True):
    """An adapter that a node is asked to have ready for the function."""

    node: str
    digest: str
    tier: Tier
    cause: Cause
    since: float
    """Unix time."""


class LeftOut(msgspec.Struct, frozen=True):
    """An adapter that was ordered, scheduled or provisioned, and that no node, or not this one, is asked to have."""

    node: str
    """Empty: any."""
    digest: str
    tier: Tier
    cause: Cause
    why: str


class ForecastReply(msgspec.Struct, frozen=True):
    """Forecast of the gateway worker that leads for a function, and what it has done about it."""

    function: str
    watched: float | None = None
    """Seconds for which it has watched calls: it foresees nothing in the first 30. Null: no worker leads now."""
    chances: dict[str, float] | None = None
    """Chances of at least one call, by seconds. Null: not called in the last 30 minutes, or not watched yet."""
    error: dict[str, float] = {}
    """Log loss and Brier score of the latest forecasts of all functions; less is better, and 0.25 is the Brier score of
    a constant 0.5."""
    wanted: list[WantedPlace] = []
    left_out: list[LeftOut] = []


class WarmReply(msgspec.Struct, frozen=True):
    """`ready`: all places have the `tier` that was asked for, or a better one."""

    function: str
    tier: Tier
    ready: bool
    places: list[WarmPlace]
