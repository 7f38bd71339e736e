"""Messages among the gateway's workers: changes of functions and tenants, calls that are to end, and which adapters
were called."""

from __future__ import annotations

from functools import partial

import msgspec

from cluster.redis_link import RedisLink
from gateway.workers.channel import Channel


class FunctionChanged(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """Nothing that was known of the function is valid any more."""

    tenant: str
    function: str


class TenantChanged(msgspec.Struct, frozen=True, array_like=True, tag="tenant"):
    tenant: str


class CallsRevoked(msgspec.Struct, frozen=True, array_like=True, tag="revoked"):
    """Generations of the function are to end now."""

    tenant: str
    function: str
    reason: str
    id: str = ""
    """Deduplication id: the same message may also arrive through the registry. Empty: an earlier release published
    it."""


class DigestCalled(msgspec.Struct, frozen=True, array_like=True, tag="called"):
    """The tenant had this adapter run, for the first time as far as the publishing worker knows."""

    tenant: str
    digest: str


class ExplanationAsked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """Query for the routing of a call. `tenant`: the call's; None: any."""

    number: str
    call: str
    tenant: str | None


class ExplanationAnswered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    number: str
    reply: bytes
    """JSON of gateway.calls.explanations.ExplainReply."""


Message = FunctionChanged | TenantChanged | CallsRevoked | DigestCalled | ExplanationAsked | ExplanationAnswered


class Peers(Channel[Message]):
    """Channel of one worker."""

    def __init__(self, link: RedisLink | None) -> None:
        super().__init__(link, "peers", Message)

    async def explain(self, call: str, tenant: str | None) -> bytes | None:
        """Returns the answer of a worker that knows the call; None when none does."""
        return await self.ask(partial(ExplanationAsked, call=call, tenant=tenant))
