"""Messages about the adapters on a node. Gateway -> node, each with the cluster secret (cluster.messages):

    GET  /adapters            the reply is AdapterStates
    POST /adapters/prefetch   body PrefetchOrder; the reply is Moved, with status 202 while the load continues
    POST /adapters/evict      body EvictOrder; the reply is Moved
    POST /adapters/wanted     body WantedResidency; the reply is 204

An error is JSON, `{"error": {"type", "message"}}`. Its HTTP status is the one that cluster.errors gives the type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.messages import PROTOCOL_VERSION, Adapter

HeldTier = Literal["device", "host", "disk", "absent"]
LayerName = Literal["no", "host", "enqueued", "device", "failed"]
WantedTier = Literal["device", "host"]


class AdapterState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one adapter on a node."""

    digest: str
    tier: HeldTier
    """Fastest tier that has the complete adapter. `absent`: it is still being fetched from the object store."""
    bytes: int
    """Size of the adapter in memory, or of its file on disk, in bytes; 0 until the size is known."""
    in_use: int = 0
    """Number of requests that hold a lease on the adapter."""
    waiting: int = 0
    """Number of queued requests and of prefetches that wait for the adapter."""
    ranks: list[int] = []
    """Distinct ranks of the adapter's projections, ascending. Empty when only its file is known."""
    layers: list[LayerName] = []
    """State of each layer while the adapter loads; empty otherwise."""


class AdapterStates(msgspec.Struct, frozen=True):
    """State of the adapters on a node."""

    adapters: list[AdapterState]
    unnamed: int = 0
    """Number of further adapters that are only on disk, and are not listed."""
    v: int = PROTOCOL_VERSION


class PrefetchOrder(msgspec.Struct, frozen=True):
    """Request to load an adapter on a node."""

    adapter: Adapter
    v: int = PROTOCOL_VERSION
    tenant: str = ""
    """Tenant that requests the prefetch; empty: the operator. Each tenant may use only some of a node's prefetch
    places."""


class WantedAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter that a node should load before it is called."""

    adapter: Adapter
    tier: WantedTier
    chance: float
    """Probability of a call within 30 seconds, 0 to 1. For an adapter that is provisioned in host memory and wanted on
    the device, it is the probability for which the device copy is wanted."""
    pinned: bool = False
    """True: an operator's policy wants the adapter in this tier. It does not count as a forecast, so wasted prefetches
    do not hold it back."""
    provisioned: WantedTier | None = None
    """Tier from which the adapter is not evicted as long as it is wanted, whatever else needs room. Such an adapter is
    loaded in parallel with the loads of requests."""


class WantedResidency(msgspec.Struct, frozen=True, omit_defaults=True):
    """All adapters that a node should load while its link and store are idle, most wanted first. The message replaces
    all earlier ones."""

    adapters: list[WantedAdapter]
    seconds: float
    """Seconds for which the message is valid, counted from receipt. After that the node wants no adapters."""
    idle_ttls: dict[str, float] = {}
    """Idle time in seconds, by digest, after which an adapter is evicted from the device. After twice that time it is
    evicted from host memory. An adapter that is wanted stays."""
    v: int = msgspec.field(default_factory=lambda: PROTOCOL_VERSION)  # a plain default would not be sent


MAX_WANTED = 64
"""Maximum number of adapters in one WantedResidency."""
MAX_IDLE_TTLS = 1024
"""Maximum number of `idle_ttls` entries in one WantedResidency."""


class EvictOrder(msgspec.Struct, frozen=True):
    """Request to evict an adapter from a node."""

    digest: str
    v: int = PROTOCOL_VERSION


class Moved(msgspec.Struct, frozen=True):
    """Reply to PrefetchOrder and EvictOrder."""

    digest: str
    tier: HeldTier | None
    """Current tier of the adapter; None while it is still loading."""
    v: int = PROTOCOL_VERSION
