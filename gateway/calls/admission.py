"""Enforces tenants' limits. Before its first choice starts, a call reserves the tokens and places that it needs, or is
refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from adapters.tenants import Tenant
from cluster.errors import ServiceError
from cluster.limits import Call, LimitState, Owner, Refusal
from cluster.messages import GenerateRequest
from gateway.catalog.door import charge_of, spend
from gateway.workers.metrics import Metrics

T = TypeVar("T")

YIELDED_SHARE = 1 / 8
"""Share of the places of a tenant, and of a function, that background calls leave free, rounded up. A place admits one
generation at a time.

Background calls are asynchronous calls and those of batches.
"""
RETRY_AFTER = 1.0
"""Value of Retry-After in seconds if it is unknown when a place becomes free."""


def call_of(
    account: Tenant,
    function: str,
    max_concurrency: int | None,
    requests: Sequence[GenerateRequest],
    *,
    yields: bool = False,
    paid: bool = True,
) -> Call:
    """Returns the tokens and places that a call takes from its tenant's and its function's limits.

    `yields`: True for a background call, which leaves some places to interactive calls. `paid`: False if no request has
    paid for the call at the door, so that its start does. Raises ServiceError `validation_failed` if the call has more
    choices than the limits allow at once.
    """
    tenant, limits = account.id, account.limits
    reserved = account.reserved if limits.concurrent is not None else {}
    owners = (Owner(tenant, limits.concurrent), Owner(f"{tenant}/{function}", max_concurrency))
    for owner, owner_text in zip(owners, ("the tenant", f"function {function}"), strict=True):
        if owner.limit is not None and len(requests) > owner.limit:
            why = f"the call has {len(requests)} choices, and {owner_text} may have {owner.limit} at once"
            raise ServiceError("validation_failed", why)
    if yields:
        owners = (_yielding(owners[0], len(requests)), _yielding(owners[1], len(requests)))
    return Call(
        tenant=tenant,
        tokens_per_minute=limits.tokens_per_minute,
        charge=None if paid else charge_of(limits, "rps"),
        tokens=sum(_prompt(request) + request.max_tokens for request in requests),
        places=len(requests),
        owners=tuple(
            owner for owner in owners if owner.limit is not None or (reserved and owner is owners[-1])
        ),  # if places are reserved for functions, each function's places are counted
        reserved=reserved.get(function, 0),
        other_functions=tuple(
            Owner(f"{tenant}/{name}", places) for name, places in reserved.items() if name != function
        ),
    )


@asynccontextmanager
async def admitted(call: Call, limits: LimitState, metrics: Metrics, used: Callable[[], int]) -> AsyncIterator[None]:
    """Reserves the tokens and places of a call as long as the context lasts.

    `used` returns the tokens that the call has used; unused ones are given back at the end. Raises ServiceError
    `rate_limited`.
    """
    if call.charge is not None:
        await spend(limits, metrics, call.tenant, call.charge)
    if not call.limited:
        yield
        return
    refusal = await _take(limits, call)
    if refusal is not None:
        metrics.count_refusal(call.tenant, refusal.why)
        raise _refused(refusal, call)
    try:
        yield
    finally:
        await _to_the_end(asyncio.ensure_future(limits.settle(call, call.tokens - used())))


async def _take(limits: LimitState, call: Call) -> Refusal | None:
    taking = asyncio.ensure_future(limits.take(call))
    try:
        return await _to_the_end(taking)
    except asyncio.CancelledError:
        if taking.result() is None:  # the reservation is not used
            await limits.settle(call, call.tokens)
        raise


async def _to_the_end(work: asyncio.Future[T]) -> T:
    """Returns the result of `work`, even if the caller is cancelled meanwhile.

    In that case it waits for the end of `work`, and then raises CancelledError: the result must be known, because it
    may have changed shared counters. The time limits of the Redis link bound the wait.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _refused(refusal: Refusal, call: Call) -> ServiceError:
    if refusal.why == "tokens":
        limit = call.tokens_per_minute
        why = f"the tenant may use {limit:g} tokens per minute, and this call may use {call.tokens}"
    else:
        owner = refusal.owner
        assert owner is not None
        function = owner.name.partition("/")[2]
        why = f"the tenant may have {owner.limit} generations under way at once"
        if call.other_functions:
            reserved = sum(owner.limit or 0 for owner in call.other_functions)
            why += f", {reserved} of which are reserved for other functions (reserved_concurrency)"
        if function:
            why = f"function {function} runs {owner.limit} generations already, its max_concurrency"
    return ServiceError("rate_limited", f"{why}; try again later", retry_after=refusal.seconds or RETRY_AFTER)


def _yielding(owner: Owner, places: int) -> Owner:
    """Returns the owner with its limit lowered by YIELDED_SHARE. The limit still admits a call of `places` places."""
    limit = owner.limit
    return owner if limit is None else Owner(owner.name, max(places, limit - math.ceil(limit * YIELDED_SHARE)))


def _prompt(request: GenerateRequest) -> int:
    """Returns the number of prompt tokens to count. It is 0 except for the first choice of a prompt, because a prompt
    counts once."""
    return 0 if request.sampling.choice else len(request.token_ids)
