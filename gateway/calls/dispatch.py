"""Runs an invocation: each generation is routed to a node and streamed from it.

If the node fails, the generation is retried or resumed on another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec

from cluster.errors import ServiceError
from cluster.limits import LimitState
from cluster.messages import Adapter, Done, Event, Failed, GenerateRequest, Started, Token, TokenLogprob
from cluster.news import RECORD_EXPIRY
from cluster.state import ClusterState
from gateway.calls.accounting import Accounting, Times
from gateway.calls.active_calls import ActiveCalls
from gateway.calls.admission import admitted
from gateway.calls.choices import Item, merged
from gateway.calls.explanations import CallKey
from gateway.calls.node_client import NodeClient
from gateway.calls.node_watch import NodeFailure
from gateway.calls.request import Invocation
from gateway.calls.routing import Router, ttft_left
from gateway.calls.scale_from_zero import RETRY_PAUSE_S, FirstNodeWait
from gateway.catalog.functions import Functions
from gateway.scheduling.route import RETRY_AFTER, Route
from gateway.workers.called import CalledDigests

ATTEMPTS = 2
"""Maximum attempts to get a first token."""
MAX_RESUMPTIONS = 2
"""Maximum number of times that one request continues on another node. So a request that crashes nodes does not reach
all of them."""
NODE_ERRORS = ("node_failed", "unavailable")
"""Errors of a node that are not the request's fault."""

log = logging.getLogger("gateway")


class Rerouted(Exception):
    """The generation continues on the node of `route`, which is reserved for it."""

    def __init__(self, route: Route) -> None:
        super().__init__(f"moved to node {route.node_id}")
        self.new_route = route


class Generation:
    """Choice of a call: runs it and records its progress."""

    def __init__(self, dispatcher: Dispatcher, invocation: Invocation, index: int) -> None:
        self.shared, self.invocation, self.index = dispatcher, invocation, index
        self.request = invocation.requests[index]
        """Request as the call states it. `_sent` derives from it the request for each node."""
        self.function = invocation.target.function
        self.times = Times(invocation.received)
        self.key = CallKey(invocation.id, invocation.request_id, self.request.tenant, self.function)
        self.stay = dispatcher.accounting.loads.track(invocation.received)
        self.node: str | None = None
        self.cold_start: str | None = None
        self.done: Done | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.resumed = 0
        self._generated: list[int] = []
        self._failures = 0
        self._last_error: ServiceError | None = None
        self._excluded_nodes: frozenset[str] = frozenset()
        self._moved: Route | None = None
        """Reserved place of the next attempt; None if the next attempt is to be routed."""
        self._is_queued = False
        self._deadline = math.inf
        self._revoked: asyncio.Future[Exception]
        """Future that gets the reason if the call must end early. Set, like the deadline, when `events` begins."""

    async def events(self) -> AsyncGenerator[Item, None]:
        """Yields (index, Token) for tokens, and (index, Done) at the end. Raises ServiceError.

        Must be closed (`aclosing`), which cancels the request on the node.
        """
        with self._accounted(), self._tracked() as self._revoked:
            self._deadline = time.monotonic() + self.request.timeout
            await self.shared.wait_for_nodes(self._deadline)
            while True:
                route = await self._next_route()
                async with self._stream_at(route) as stream:
                    try:
                        async with aclosing(stream) as events:
                            async for event in events:
                                if (item := self._record(event)) is not None:
                                    yield self.index, item
                        return
                    except Rerouted as rerouted:
                        self._moved = rerouted.new_route
                        self._resume()
                    except NodeFailure as failure:
                        self._retry(route, failure)

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Counts the generation as open, and records its outcome and usage at the end."""
        accounting, outcome = self.shared.accounting, "cancelled"
        accounting.metrics.change_open(1)
        try:
            yield
        except Exception as error:
            outcome = error.type if isinstance(error, ServiceError) else "internal"
            self.invocation.meter.fail()
            raise
        except BaseException:  # the caller has disconnected, or the gateway is stopping
            if self.done is None:
                cold = self.cold_start not in (None, "none")
                self.invocation.meter.cut(self._prompt_tokens, self.times.tokens, cold)
            raise
        finally:
            accounting.metrics.change_open(-1)
            self.stay.end()
            accounting.record_end(self.request, self.function, outcome, self.done, self.times, self.stay)

    async def _next_route(self) -> Route:
        """Returns the place for the next attempt: the one that the generation is moved to, or a routed one. Raises
        ServiceError."""
        if time.monotonic() >= self._deadline:
            raise self._last_error or ServiceError("timeout", "the timeout passed before the request reached a node")
        route = self._moved or await self._route_or_hold(self._excluded_nodes, self._last_error)
        self._moved = None
        return route

    @asynccontextmanager
    async def _stream_at(self, route: Route) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Yields the stream of events from the node of `route`, and releases the place at the end."""
        self.stay.wait(route.pool, route.work)
        self._set_queued(True)
        try:
            yield self.shared.client.stream(route, self._sent(route), self._interruption())
        finally:
            self._set_queued(False)
            await self.shared.state.release(route.node_id, self.request.id)

    def _record(self, event: Event) -> Token | Done | None:
        """Records a node's event. Returns it if the client gets it, else None. Raises NodeFailure and ServiceError."""
        if isinstance(event, Token):
            self._record_token(event)
            return event
        if isinstance(event, Done):
            self._record_done(event)
            return event
        if isinstance(event, Started):
            self._record_start(event)
        elif isinstance(event, Failed):
            raise NodeFailure(self._error_of(event), retryable=event.retryable)
        else:  # collected, because another node may have to send them again
            self.prompt_logprobs += event.logprobs
        return None

    def _retry(self, route: Route, failure: NodeFailure) -> None:
        """Prepares an attempt on another node. Raises the failure's ServiceError if there may be none."""
        log.warning("%s", failure, extra={"invocation": self.request.id})
        self._failures += 1
        if not self._is_retryable(failure):
            raise failure.error from failure
        self._last_error, self._excluded_nodes = failure.error, self._excluded_nodes | {route.node_id}
        self._resume()
        self.shared.accounting.metrics.count_retry()

    @property
    def used_tokens(self) -> int:
        """Returns the number of reserved tokens that this generation has used so far."""
        return self._prompt_tokens + (self.times.tokens if self.done is None else self.done.completion_tokens)

    @property
    def _prompt_tokens(self) -> int:
        """Returns the number of prompt tokens used. It is 0 until the prompt has started on a node, and for all choices
        but the first."""
        return 0 if self.request.sampling.choice or self.times.started_at is None else len(self.request.token_ids)

    async def route(self, excluded: frozenset[str], *, displaces: bool = False, counts_refusal: bool = False) -> Route:
        """Reserves a place on a node that is not in `excluded`, and returns it. Raises ServiceError if there is
        none."""
        generated = None if self.times.first_at is None else self.times.tokens
        return await self.shared.router.route(
            self.key,
            self.request,
            generated,
            self.times.received,
            excluded,
            displaces=displaces,
            counts_refusal=counts_refusal,
        )

    def _tracked(self) -> AbstractContextManager[asyncio.Future[Exception]]:
        """Registers the generation, so that it can be revoked. Yields the future whose result is the reason for a
        revocation."""
        return self.shared.running.track(self.request.tenant, self.function, self.times.received)

    def _interruption(self) -> asyncio.Future[Exception]:
        """Returns the future that interrupts the next attempt."""
        return self._revoked

    async def _route_or_hold(self, excluded: frozenset[str], failure: ServiceError | None) -> Route:
        """Routes the request and returns its place. If an autoscaler runs, the request may wait for a node. Raises
        ServiceError.

        It waits if there is no node, if the only node has just refused the request because it is stopping, and if the
        first node to start is full.
        """
        hold, until = self.shared.hold, math.inf
        while True:
            try:
                return await self._route(excluded, failure)
            except ServiceError as error:
                began, refused = time.monotonic(), failure is None or failure.type == "unavailable"
                empty = refused and await hold.should_wait(excluded)
                first_node_is_full = until < math.inf and error.type == "overloaded"  # a node came while it was held
                if not empty and (not first_node_is_full or began + RETRY_PAUSE_S > until):
                    raise
            until = min(until, began + hold.seconds, self._deadline)
            self.stay.wait(None, None)
            if empty and not excluded:
                await hold.wait(until, self._revoked)
            else:  # the node is full, or its new record has not arrived yet
                await asyncio.wait([self._revoked], timeout=max(0.0, min(RETRY_PAUSE_S, until - began)))
            excluded, failure = frozenset(), None
            self.times.hold_wait += time.monotonic() - began
            self._check_held(until)

    def _check_held(self, until: float) -> None:
        """Raises ServiceError if the request may not wait any longer."""
        if self._revoked.done():
            raise self._revoked.result()
        if time.monotonic() >= self._deadline:
            raise ServiceError("timeout", "the timeout passed before a node was ready")
        if time.monotonic() >= until:
            raise self.shared.hold.timeout_error()

    async def _route(self, excluded: frozenset[str], failure: ServiceError | None) -> Route:
        """Returns a place on a node that is not in `excluded`. If there is none, raises `failure`, the error of the
        first attempt, if that is not None."""
        began = time.monotonic()
        displaces, is_first = self.shared.router.displaces(self.request), failure is None and not self.times.hold_wait
        try:
            return await self.route(excluded, displaces=displaces, counts_refusal=is_first)
        except ServiceError as error:
            raise failure or error from None
        finally:
            self.times.schedule += time.monotonic() - began

    def _sent(self, route: Route) -> GenerateRequest:
        """Returns the request for the node, and records that it is sent.

        Once tokens have arrived, the node continues after them with the same seed, adapter and limits. The TTFT target
        and the prompt's log probabilities are then dropped.
        """
        self.node, now = route.node_id, time.monotonic()
        if not self.resumed:
            self.times.sent_at, self.times.started_at, self.times.forecast = now, None, route.forecast
            self.prompt_logprobs = []
        request, remaining_s = self.request, self._deadline - now
        if self.times.first_at is None:
            ttft = ttft_left(request, self.times.received)
            return msgspec.structs.replace(request, timeout=remaining_s, ttft=ttft, place=route.number)
        return msgspec.structs.replace(
            request,
            timeout=remaining_s,
            ttft=None,
            place=route.number,
            generated=list(self._generated),
            sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=None),
        )

    def _is_retryable(self, failure: NodeFailure) -> bool:
        """Returns whether the request may be tried on another node."""
        if self.times.first_at is None:
            return failure.retryable and self._failures < ATTEMPTS
        return self.resumed < MAX_RESUMPTIONS and (failure.retryable or failure.error.type in NODE_ERRORS)

    def _resume(self) -> None:
        """Counts a resumption on another node, if tokens have arrived."""
        if self.times.first_at is not None:
            self.resumed += 1
            self.stay.restart()

    def _set_queued(self, is_queued: bool) -> None:
        """Records whether the request is in a node's queue now."""
        if not is_queued:
            self.stay.begin()
        if is_queued and not self._is_queued:
            self.shared.router.queued.join(self.request.tenant, self.request.weight)
        elif self._is_queued and not is_queued:
            self.shared.router.queued.leave(self.request.tenant)
        self._is_queued = is_queued

    def _record_start(self, event: Started) -> None:
        if not self.resumed:
            self.cold_start, self.times.started_at = event.cold_start, time.monotonic()
        self._set_queued(False)
        if self.request.adapter is not None:
            self.shared.called.run(self.request.tenant, self.request.adapter.digest)

    def _record_token(self, event: Token) -> None:
        self._generated += event.token_ids
        times = self.times
        times.tokens, times.last_at = len(self._generated), time.monotonic()
        if times.first_at is None:
            times.first_at = times.last_at

    def _record_done(self, event: Done) -> None:
        """Records the end of the generation. Raises ServiceError if it ended by timeout before the first token."""
        self.done, self.times.done_at = event, time.monotonic()
        if event.finish_reason == "timeout" and event.completion_tokens == 0:
            if self.times.started_at is None:
                raise ServiceError("unavailable", "the timeout passed in the node's queue", retry_after=RETRY_AFTER)
            raise ServiceError("timeout", "the timeout passed before the first token")
        if event.finish_reason in ("stop", "length"):
            self.shared.router.lengths.record(self.request.tenant, self.function, event.completion_tokens)
        cold = event.timing.cold_start.state != "none"
        prompt, device = 0 if self.request.sampling.choice else event.prompt_tokens, event.timing.device
        self.invocation.meter.done(prompt, event.completion_tokens, cold, device)

    def _error_of(self, event: Failed) -> ServiceError:
        if event.damaged and event.damaged == self.invocation.target.digest:
            return self.shared.functions.remake(self.request.tenant, self.invocation.target)
        return ServiceError(event.type, event.message, retry_after=event.retry_after)


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """Runs all calls of one gateway worker. `generations` creates one Generation per choice, which then calls nodes."""

    state: ClusterState
    router: Router
    client: NodeClient
    hold: FirstNodeWait
    limits: LimitState
    functions: Functions
    accounting: Accounting
    called: CalledDigests
    record_call: Callable[[str, str, Adapter], None]
    generation: Callable[[Dispatcher, Invocation, int], Generation] = Generation
    running: ActiveCalls = field(default_factory=ActiveCalls)
    began: float = field(default_factory=time.monotonic)

    async def wait_for_nodes(self, deadline: float) -> None:
        """Waits until a node is live, or until all live nodes must have reported. Waits at most until the deadline, in
        monotonic seconds."""
        # A node that has not reported by then is taken for dead anyway.
        until = min(deadline, self.began + RECORD_EXPIRY)
        # The state may be shared with other processes, so no local event signals a change.
        while time.monotonic() < until and not (await self.state.table()).live.any():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def generations(self, invocation: Invocation) -> list[Generation]:
        """Returns one generation per choice. They are not started yet."""
        if (adapter := invocation.target.adapter) is not None:
            self.record_call(invocation.tenant, invocation.target.function, adapter)
        return [self.generation(self, invocation, index) for index in range(len(invocation.requests))]


@asynccontextmanager
async def events_of(generations: Sequence[Generation]) -> AsyncIterator[AsyncGenerator[Item, None]]:
    """Admits a call, and yields an iterator over the merged events of all its generations.

    Raises the first ServiceError, and then ends the other generations.
    """
    shared, call = generations[0].shared, generations[0].invocation.call

    def used() -> int:
        return sum(generation.used_tokens for generation in generations)

    async with admitted(call, shared.limits, shared.accounting.metrics, used):
        streams = [generation.events() for generation in generations]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as events:
            yield events
