"""Deliveries of ended events to their destinations. A delivery is made at least once, and is retried for about a day if
it fails."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from adapters.errors import NotFound
from adapters.functions import Policy
from cluster.errors import ServiceError
from gateway.events.events import Events
from gateway.events.messages import EventReply, reply_of
from gateway.events.records import Delivery, EventRecord, new_nonce
from gateway.events.transitions import accepted
from gateway.events.webhook_secrets import read_secrets
from gateway.events.webhooks import SEND_S, NotDelivered, Webhooks
from gateway.jobs.job_store import Stored
from gateway.jobs.poller import NoPlace
from gateway.places.places import Places

PolicyOf = Callable[[str, str, str | None], Awaitable[Policy]]
"""Function that returns the policy of a function, by tenant, name and qualifier. Raises StoreUnavailable."""
PAUSES_S = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0)
"""Seconds from each failed try of a delivery to the next; the last value repeats."""
GIVEN_UP_S = 86400.0
TRY_S = 2 * SEND_S
"""Seconds after the start of a try in which no other worker tries. So a slow receiver gets one message even from
several gateways."""
MAX_BODY = 256 << 10
"""Maximum bytes of a webhook. A result that exceeds it is omitted and can be fetched by the event's id."""
MAX_DEPTH = 8
"""Maximum length of a chain of events. It stops functions that endlessly call each other as destinations."""


class WebhookBody(msgspec.Struct, frozen=True):
    """Body of a webhook."""

    type: str
    """Type of the message: `invocation.` followed by the event's final state."""
    timestamp: str
    data: EventReply


class Deliveries:
    """Deliveries of one worker. Webhooks and calls of functions have separate places."""

    def __init__(self, events: Events, webhooks: Webhooks, policy_of: PolicyOf, calls: Places) -> None:
        """`calls`: places for calls of functions as destinations."""
        self._events = events
        self._calls = calls
        self._webhooks = webhooks
        self._policy_of = policy_of

    async def deliver(self, stored: Stored[EventRecord]) -> None:
        """Tries a delivery once. The try is stored first, so that another worker tries again if this one dies.

        Raises NoPlace if the event's tenant has no free place for a delivery of this kind.
        """
        delivery, tenant = stored.record.delivery, stored.record.tenant
        assert delivery is not None
        places = self._webhooks.places if delivery.to.function is None else self._calls
        if not places.has_room(tenant):
            raise NoPlace(partial(places.has_room, tenant))
        with places.hold_now(tenant):
            await self._try(stored, delivery)

    async def _try(self, stored: Stored[EventRecord], delivery: Delivery) -> None:
        events = self._events
        started = _replaced(stored.record, attempts=delivery.attempts + 1, due=await events.clock.now() + TRY_S)
        claim = await events.threads.write(events.store.change, stored, started)
        if claim is None:
            return
        try:
            await self._send(claim.record, delivery)
        except NotDelivered as error:
            ended = _failed(claim.record, delivery, error, await events.clock.now())
        else:
            ended = _replaced(claim.record, problem=None, state="delivered")
        await events.threads.write(events.store.change, claim, ended)

    async def _send(self, event: EventRecord, delivery: Delivery) -> None:
        """Sends the event's webhook once. Raises NotDelivered, StoreUnavailable."""
        if delivery.to.function is not None:
            return await self._call(event, delivery.to.function)
        assert delivery.to.webhook is not None
        secrets = await self._events.threads.read(read_secrets, self._events.store.objects, event.tenant)
        url, body = delivery.to.webhook, webhook_body(event)
        await self._webhooks.send(event.tenant, url, message_id(event), body, secrets)
        return None

    async def _call(self, event: EventRecord, destination: str) -> None:
        if event.depth >= MAX_DEPTH:
            raise NotDelivered(f"the event is the last of a chain of {MAX_DEPTH}, the maximum", for_good=True)
        function, _, qualifier = destination.partition(":")
        policy = await self._policy_of(event.tenant, function, qualifier or None)
        called = accepted(
            policy,
            await self._events.clock.now(),
            # The same id in each try, so that the function is called once.
            id=f"inv_{hashlib.sha256(f'{message_id(event)} to {destination}'.encode()).hexdigest()[:24]}",
            tenant=event.tenant,
            function=function,
            qualifier=qualifier or None,
            request={"prompt": _prompt(event)},
            on_success=policy.on_success,
            on_failure=policy.on_failure,
            depth=event.depth + 1,
        )
        try:
            await self._events.add(called)
        except (ServiceError, NotFound) as error:  # no room for it, or the tenant is being removed
            raise NotDelivered(str(error)) from None


def message_id(event: EventRecord) -> str:
    """Returns the id of the event's message. It is the same for all tries, and changes if the event is redriven."""
    return f"{event.id}-{event.redriven}" if event.redriven else event.id


def webhook_body(event: EventRecord) -> bytes:
    ended = datetime.fromtimestamp(event.changed, UTC).isoformat()
    reply = reply_of(msgspec.structs.replace(event, delivery=None))
    body = msgspec.json.encode(WebhookBody(f"invocation.{event.state}", ended, reply))
    if len(body) <= MAX_BODY:
        return body
    short = msgspec.structs.replace(reply, result=None)
    return msgspec.json.encode(WebhookBody(f"invocation.{event.state}", ended, short))


def _prompt(event: EventRecord) -> str:
    """Returns the prompt for a destination's function: the text of the result, or the error as JSON."""
    if event.result is not None:
        return event.result.output.text
    error = None if event.error is None else msgspec.to_builtins(event.error)
    return msgspec.json.encode({"id": event.id, "function": event.function, "error": error}).decode()


def _failed(event: EventRecord, tried: Delivery, error: NotDelivered, now: float) -> EventRecord:
    """Returns the event after a failed try of its delivery. `tried`: the delivery before that try."""
    next_try = now + PAUSES_S[min(tried.attempts, len(PAUSES_S) - 1)] * random.uniform(0.8, 1.2)
    over = error.for_good or next_try > tried.began + GIVEN_UP_S
    return _replaced(event, problem=str(error), state="failed" if over else "pending", due=next_try)


def _replaced(event: EventRecord, **fields: Any) -> EventRecord:
    assert event.delivery is not None
    delivery = msgspec.structs.replace(event.delivery, nonce=new_nonce(), **fields)
    return msgspec.structs.replace(event, delivery=delivery)
