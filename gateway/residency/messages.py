"""Messages about warm adapters: adapters that nodes load before they are called. Imports few modules, because the
command line imports this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from cluster.messages import Adapter
from cluster.residency import HeldTier

Tier = Literal["device", "host"]
Cause = Literal["provisioned", "order", "schedule", "forecast"]

MAX_COPIES = 16
WARM_SECONDS = 60.0
"""Maximum seconds for which a deploy waits for a version to be warm before the version gets calls."""
WATCH_SECONDS = 30.0
"""Seconds for which a new leader observes calls before it forecasts. They equal the horizon of the forecasts that
prewarming uses."""


class Version(NamedTuple):
    """A version that is to be warm."""

    number: int
    adapter: Adapter


class WarmOrder(NamedTuple):
    """Order to load versions of a function, each on `copies` nodes, into the memory tier `tier`."""

    tenant: str
    function: str
    versions: Sequence[Version]
    tier: Tier = "device"
    copies: int = 1


class WarmPlace(msgspec.Struct, frozen=True):
    """A version on a node that must load it."""

    version: int
    node: str
    tier: HeldTier
    """Tier that holds the version now. `absent` means that it is still loading, or that it failed with `error`."""
    error: str | None = None


class WantedPlace(msgspec.Struct, frozen=True):
    """An adapter that a node is ordered to have ready for the function's calls."""

    node: str
    digest: str
    tier: Tier
    cause: Cause
    since: float


class LeftOut(msgspec.Struct, frozen=True):
    """A request for a warm adapter that the leader could not plan, because the node has no room or a limit is reached.
    `why` is the reason."""

    node: str
    """Node that can't take the adapter. Empty if no node has room for a provisioned copy."""
    digest: str
    tier: Tier
    cause: Cause
    why: str


class ForecastReply(msgspec.Struct, frozen=True):
    """Forecast of a function's calls, and the adapters that nodes must have ready because of it. Both come from the
    gateway worker that is the leader."""

    function: str
    watched: float | None = None
    """Seconds for which the leader has observed calls. It forecasts nothing in the first 30 seconds. Null if there is
    no leader now."""
    chances: dict[str, float] | None = None
    """Probability of at least one call within each horizon; keys are seconds from now. Null if the function was not
    called in the last 30 minutes, or if the leader does not forecast yet."""
    error: dict[str, float] = {}
    """Log loss and Brier score of the latest forecasts of all functions. Lower is better; a constant forecast of 0.5
    has a Brier score of 0.25."""
    wanted: list[WantedPlace] = []
    left_out: list[LeftOut] = []


class WarmReply(msgspec.Struct, frozen=True):
    """State of the adapters that were ordered to be warm. `places` lists each version on each chosen node. `ready` is
    true if each of them is in the requested `tier` or a faster one."""

    function: str
    tier: Tier
    ready: bool
    places: list[WarmPlace]
