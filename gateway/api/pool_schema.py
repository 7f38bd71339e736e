"""Messages of the routes below /pools."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What calls ask, over the last ten seconds. Work is in nodes' time, by the nodes' cost models."""

    open_requests: int
    queue_wait: float
    """Seconds, of the request that has waited longest; 0 when none waits."""
    demand: float
    """Work that arrives per second, in nodes."""
    backlog: float
    """Work that waits, in seconds of one node."""
    attainment: float | None
    """Share of the calls that got what they were promised; null where nothing was promised."""


class Pool(Load, frozen=True, kw_only=True):
    pool: str | None
    """Null: nodes of no pool."""
    nodes: int
    """That report."""
    ready: int


class PoolList(msgspec.Struct, frozen=True):
    pools: list[Pool]
    unplaced: Load
    """Requests that no node could take: held for a first node, or refused because all were full."""
    workers: int
    """Gateway workers whose counts these are."""
    stale: float | None
    """Seconds since the gateway's workers were last in step; null while they are."""
    autoscaler: str | None
    """Who holds the autoscaler's lease; null: nobody, or it can't be told."""


class LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    holder: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,200}$", max_length=200)]
    seconds: Annotated[float, Meta(ge=0, le=300)]
    """For so long from now; 0 gives it back."""


class LeaseReply(msgspec.Struct, frozen=True):
    holder: str | None
    """Who has it now."""
    seconds: float
    """Until it ends by itself."""
