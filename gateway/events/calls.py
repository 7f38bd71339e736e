"""Asynchronous calls: each is checked and accepted like any call, and later run as best effort."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from adapters.destinations import Destination
from adapters.errors import NotFound
from adapters.functions import Policy
from adapters.store import ObjectStore
from cluster.errors import ServiceError
from gateway.api.schema import InvokeReply, InvokeRequest
from gateway.calls.dispatch import Dispatcher
from gateway.calls.prompts import source_of
from gateway.calls.reply import collect, invoke_reply
from gateway.calls.request import InputProcessor, background_request
from gateway.catalog.threads import StoreThreads
from gateway.events.deliveries import Deliveries
from gateway.events.destinations import Destinations
from gateway.events.events import Events
from gateway.events.records import EventRecord
from gateway.events.transitions import accepted
from gateway.events.webhook_secrets import read_secrets
from gateway.events.webhooks import Webhooks
from gateway.events.worker import NotKnownHere, Worker
from gateway.http.stopwatch import Stopwatch
from gateway.places.pools import Pools

IDEMPOTENCY_HEADER = "idempotency-key"
MAX_KEY_CHARACTERS = 255
OWN_FIELDS = ("background", "stream", "on_success", "on_failure")
"""Fields of the request that determine how the call is run, and not what is generated."""


@dataclass(frozen=True, kw_only=True)
class EventCalls:
    """Accepts and runs asynchronous calls."""

    events: Events
    inputs: InputProcessor
    dispatcher: Dispatcher
    destinations: Destinations
    store: ObjectStore
    threads: StoreThreads
    pools: Pools

    async def accept(
        self,
        request: Request,
        tenant: str,
        watch: Stopwatch,
        *,
        function: tuple[str, str | None],
        call: InvokeRequest,
    ) -> EventRecord:
        """Stores the call as an event and returns the event.

        Raises the errors of a call that can't be run, and ServiceError: `overloaded` for a full queue, `conflict` for
        an Idempotency-Key that another call has used.
        """
        source = source_of(call, self.inputs.base.vocab_size)
        invocation = await self.inputs.prepare(request, tenant, watch, function=function, source=source, stated=call)
        policy = invocation.target.policy
        on_success, on_failure = call.on_success or policy.on_success, call.on_failure or policy.on_failure
        await self._check(tenant, on_success, "on_success", stated=call.on_success is not None)
        await self._check(tenant, on_failure, "on_failure", stated=call.on_failure is not None)
        stated = msgspec.to_builtins(call)
        arguments = {name: value for name, value in stated.items() if name not in OWN_FIELDS and value is not None}
        event = accepted(
            policy,
            await self.events.clock.now(),
            id=_event_id(request, tenant),
            tenant=tenant,
            function=function[0],
            qualifier=function[1],
            request=arguments,
            fingerprint=_fingerprint(function, arguments, call),
            on_success=on_success,
            on_failure=on_failure,
        )
        return await self.events.add(event)

    async def execute(self, event: EventRecord) -> InvokeReply:
        """Runs the event's call once and returns its reply. Raises the errors of calls. Raises NotKnownHere if the call
        has fields of a newer release."""
        try:
            call = msgspec.convert(event.request, InvokeRequest)
        except msgspec.ValidationError:
            raise NotKnownHere from None
        function, source = (event.function, event.qualifier), source_of(call, self.inputs.base.vocab_size)
        request, watch = background_request(event.id, rate_taken=is_rate_taken(event)), Stopwatch()
        invocation = await self.inputs.prepare(
            request, event.tenant, watch, function=function, source=source, stated=call
        )
        generations = self.dispatcher.generations(invocation)
        outcomes = await collect(generations)
        return msgspec.structs.replace(invoke_reply(generations, outcomes), id=event.id)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs events of all tenants in this process for as long as the context lasts."""

        async def can_run() -> bool:
            """Returns whether a node serves the model, or will be started for waiting calls."""
            nodes = (await self.inputs.cluster.table()).serving(self.inputs.base.fingerprint)
            return bool(nodes.rows.size) or await self.dispatcher.hold.should_wait()

        async def policy_of(tenant: str, name: str, qualifier: str | None) -> Policy:
            try:
                choices = await self.inputs.functions.choices(tenant, name, qualifier)
            except NotFound:  # the call itself will raise it
                return Policy()
            return choices[0].version.policy

        pools = self.pools
        webhooks = Webhooks(self.destinations.webhook_hosts, pools["webhooks"], pools["webhook_names"])
        deliveries = Deliveries(self.events, webhooks, policy_of, pools["destinations"])
        async with Worker(self.events, self.execute, deliveries, can_run, pools["event_runs"]).running():
            yield

    async def _check(self, tenant: str, destination: Destination | None, field: str, *, stated: bool) -> None:
        """Checks a destination. Raises InvalidRequest, and ServiceError `validation_failed` if it can't be reached.

        `stated`: True if the call states it. A function that a policy names was checked when the policy was set; if it
        was deleted since, the call still runs.
        """
        if destination is None or (destination.webhook is None and not stated):
            return
        await self.destinations.check(tenant, destination, field)
        if destination.webhook is None:
            return
        if not await self.threads.read(read_secrets, self.store, tenant):
            why = "the tenant has no webhook secret to sign with: POST /tenants/{id}/webhook-secrets makes one"
            raise ServiceError("validation_failed", why, param=f"{field}.webhook")


def is_rate_taken(event: EventRecord) -> bool:
    """Returns whether the request that submitted the event has taken its call from `rps`. No request has done so for
    a destination's call, or for each dead letter that is redriven."""
    return event.depth == 0 and event.redriven == 0


def _event_id(request: Request, tenant: str) -> str:
    """Returns the event's id, which is the same for a tenant's calls with the same Idempotency-Key. Raises
    ServiceError."""
    key = request.headers.get(IDEMPOTENCY_HEADER)
    if key is None:
        return f"inv_{secrets.token_hex(12)}"
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        why = f"Idempotency-Key must have 1 to {MAX_KEY_CHARACTERS} characters"
        raise ServiceError("validation_failed", why, param=IDEMPOTENCY_HEADER)
    return f"inv_{hashlib.sha256(f'{tenant}/{key}'.encode()).hexdigest()[:24]}"


def _fingerprint(name: tuple[str, str | None], request_fields: dict[str, Any], call: InvokeRequest) -> str:
    content = msgspec.json.encode([name, request_fields, call.on_success, call.on_failure], order="sorted")
    return hashlib.sha256(content).hexdigest()
