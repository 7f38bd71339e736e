"""Messages between the gateway's workers: changed functions and tenants, calls to end, and called adapters."""

from __future__ import annotations

from functools import partial

import msgspec

from cluster.redis_link import RedisLink
from gateway.workers.channel import Channel


class FunctionChanged(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """Notice that a function has changed. Receivers forget all cached data of it."""

    tenant: str
    function: str


class TenantChanged(msgspec.Struct, frozen=True, array_like=True, tag="tenant"):
    tenant: str


class CallsRevoked(msgspec.Struct, frozen=True, array_like=True, tag="revoked"):
    """Request to end all generations of a function now."""

    tenant: str
    function: str
    reason: str
    id: str
    """Id of the revocation, by which duplicates are ignored: the same message may also arrive through the registry."""


class DigestCalled(msgspec.Struct, frozen=True, array_like=True, tag="called"):
    """Notice that a tenant has run an adapter, for the first time as far as the sender knows."""

    tenant: str
    digest: str


class ExplanationAsked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Query for the routing of a call. `tenant`: owner of the call; None means any tenant."""

    number: str
    call: str
    tenant: str | None


class ExplanationAnswered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    number: str
    reply: bytes
    """JSON of gateway.calls.explanations.ExplainReply."""


Message = FunctionChanged | TenantChanged | CallsRevoked | DigestCalled | ExplanationAsked | ExplanationAnswered


class Peers(Channel[Message]):
    """Channel of one worker to the other workers of its gateway."""

    def __init__(self, link: RedisLink | None) -> None:
        super().__init__(link, "peers", Message)

    async def explain(self, call: str, tenant: str | None) -> bytes | None:
        """Returns the routing of a call as JSON of ExplainReply; None if no worker knows the call."""
        return await self.ask(partial(ExplanationAsked, call=call, tenant=tenant))
