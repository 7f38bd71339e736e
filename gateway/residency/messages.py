"""Messages about warm adapters. Imports few modules, because the command line imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from cluster.messages import Adapter
from cluster.residency import HeldTier

Tier = Literal["device", "host"]
Cause = Literal["provisioned", "order", "schedule", "forecast"]

MAX_COPIES = 16
"""Maximum copies of a version that an order may ask for."""
WARM_SECONDS = 60.0
"""Maximum seconds for which a deploy waits for a version to be warm before the version gets calls."""
WATCH_SECONDS = 30.0
"""Seconds for which a new leader observes calls before it forecasts: the horizon of the forecasts that are used."""


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
    """Tier that holds it now; `absent`: it is still loading, unless there is an `error`."""
    error: str | None = None
    """Reason why the node does not take it."""


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
    """Node; empty: any node."""
    digest: str
    tier: Tier
    cause: Cause
    why: str


class ForecastReply(msgspec.Struct, frozen=True):
    """Forecast of the gateway worker that leads for a function, and what it has done about it."""

    function: str
    watched: float | None = None
    """Seconds for which the leader has observed calls: it forecasts nothing in the first 30. Null: there is no leader
    now."""
    chances: dict[str, float] | None = None
    """Probability of at least one call, by seconds from now. Null: not called in the last 30 minutes, or not observed
    yet."""
    error: dict[str, float] = {}
    """Log loss and Brier score of the latest forecasts of all functions. Lower is better; a constant 0.5 has a Brier
    score of 0.25."""
    wanted: list[WantedPlace] = []
    left_out: list[LeftOut] = []


class WarmReply(msgspec.Struct, frozen=True):
    """`ready`: all places have the `tier` that was asked for, or a better one."""

    function: str
    tier: Tier
    ready: bool
    places: list[WarmPlace]
