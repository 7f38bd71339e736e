"""Requests of operators about a node's adapters. Gateway -> node, each with the cluster secret (cluster.messages):

    GET  /adapters            the reply is AdapterStates
    POST /adapters/prefetch   body PrefetchOrder; the reply is Moved, with status 202 while the load continues
    POST /adapters/evict      body EvictOrder; the reply is Moved
    POST /adapters/wanted     body WantedResidency; 204

An error is JSON, `{"error": {"type", "message"}}`, with the status that cluster.errors gives the type.
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
    """Tier where all of it is; absent: it is arriving from the object store."""
    bytes: int
    """Bytes that it takes in memory, or of its file on the disk; 0 until that is known."""
    in_use: int = 0
    """Requests that hold a lease on it."""
    waiting: int = 0
    """Requests in the queue, and prefetches, that want it."""
    ranks: list[int] = []
    """The different ranks of its projections, ascending. None where only its file is known."""
    layers: list[LayerName] = []
    """State of each layer while it loads. Empty otherwise."""


class AdapterStates(msgspec.Struct, frozen=True):
    adapters: list[AdapterState]
    unnamed: int = 0
    """Number of further adapters that are on the disk alone."""
    v: int = PROTOCOL_VERSION


class PrefetchOrder(msgspec.Struct, frozen=True):
    adapter: Adapter
    v: int = PROTOCOL_VERSION
    tenant: str = ""
    """Tenant that asks; empty: the operator. A tenant has only some of a node's places for prefetches."""


class WantedAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter that a node is to have ready before it is called."""

    adapter: Adapter
    tier: WantedTier
    chance: float
    """Probability of a call within 30 seconds, 0 to 1. Of what is provisioned in host memory and wanted on the device,
    the chance for which it is wanted there."""
    pinned: bool = False
    """An operator's policy wants it there; it does not count as a forecast, and waste does not hold it back."""
    provisioned: WantedTier | None = None
    """Tier that it does not leave, whatever else needs room, as long as it is wanted. It is loaded in parallel with
    requests' loads."""


class WantedResidency(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that a node is to bring in while its link and store are idle, most wanted first. It replaces what an earlier
    message wanted."""

    adapters: list[WantedAdapter]
    seconds: float
    """Time for which it holds, from receipt; after it nothing is wanted."""
    idle_ttls: dict[str, float] = {}
    """Seconds without a request, by digest, after which the adapter leaves the device, and after twice as many host
    memory, unless it is wanted."""
    v: int = msgspec.field(default_factory=lambda: PROTOCOL_VERSION)  # a plain default would not be sent


MAX_WANTED = 64
"""Adapters in one WantedResidency."""
MAX_IDLE_TTLS = 1024
"""Entries of `idle_ttls` in one WantedResidency."""


class EvictOrder(msgspec.Struct, frozen=True):
    digest: str
    v: int = PROTOCOL_VERSION


class Moved(msgspec.Struct, frozen=True):
    digest: str
    tier: HeldTier | None
    """Tier of the adapter now; None while its load continues."""
    v: int = PROTOCOL_VERSION
