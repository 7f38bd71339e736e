"""Messages of the routes below /nodes/{id}."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cluster.residency import HeldTier, LayerName


class AdapterRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An adapter, by exactly one of the two: a `function` (also `name:alias` or `name:version`) of the tenant that
    `x-garnish-tenant` names, or a version's `digest`."""

    function: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)] | None = None


class NodeAdapter(msgspec.Struct, frozen=True):
    """An adapter on a node."""

    digest: str
    tier: HeldTier
    """Where all of it is; `absent`: it is arriving from the registry."""
    bytes: int
    """In memory, or of its file on the disk; 0 until that is known."""
    ranks: list[int]
    """Of its projections, without repeats. Empty for one that is on the disk alone."""
    in_use: int
    """Requests that are computed with it."""
    waiting: int
    """Requests and prefetches that wait for it."""
    layers: list[LayerName] | None
    """While it loads: how far each layer has come. Null when it does not."""


class NodeAdapters(msgspec.Struct, frozen=True):
    node: str
    adapters: list[NodeAdapter]
    unnamed: int
    """So many more are on the disk alone."""


class MovedReply(msgspec.Struct, frozen=True):
    """`tier` is where the adapter is now; null while its load goes on."""

    node: str
    digest: str
    tier: HeldTier | None
