"""Runs an invocation: places it, streams it from a node, and begins it anew or resumes it on another node when that
one fails."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import msgspec

from cluster.errors import ServiceError
from cluster.limits import LimitState
from cluster.messages import Done, Failed, GenerateRequest, PromptLogprobs, Started, Token, TokenLogprob
from cluster.news import RECORD_EXPIRY
from cluster.queue_shares import QueueShares
from cluster.state import ClusterState
from gateway.calls.explanations import PlacedCall
from gateway.calls.holding import AGAIN_SECONDS, Hold
from gateway.calls.invocation import Invocation
from gateway.calls.migration import Migration, Moved
from gateway.calls.node_client import NodeClient
from gateway.calls.node_watch import NodeFailure
from gateway.calls.placing import Placer, ttft_left
from gateway.calls.resumption import may_resume, resumption_of
from gateway.calls.running import Running, interruptible
from gateway.calls.trace_log import log_call
from gateway.catalog.functions import Functions
from gateway.residency.residency import Residency
from gateway.scheduling.placement import RETRY_AFTER, Placed
from gateway.workers.attainment import Attainment, judge
from gateway.workers.called import CalledDigests
from gateway.workers.last_hour import Counts, LastHour
from gateway.workers.metrics import Metrics
from gateway.workers.pool_loads import PoolLoads

ATTEMPTS = 2
"""To get a first token."""
JUDGED = frozenset({"ok", "overloaded", "timeout", "unavailable", "node_failed", "internal"})
"""Outcomes of which the service, and not its caller, has to answer whether a promise was kept."""

log = logging.getLogger("gateway")


@dataclass(frozen=True, kw_only=True)
class Dispatcher:
    """What all calls of this worker need; `generations` makes one Generation for each choice, which calls nodes."""

    state: ClusterState
    placer: Placer
    client: NodeClient
    migration: Migration
    hold: Hold
    limits: LimitState
    functions: Functions
    residency: Residency
    metrics: Metrics
    called: CalledDigests
    running: Running = field(default_factory=Running)
    last_hour: LastHour = field(default_factory=partial(LastHour, time.monotonic))
    attainment: Attainment = field(default_factory=partial(Attainment, time.monotonic))
    loads: PoolLoads = field(default_factory=partial(PoolLoads, time.monotonic))
    waiting: QueueShares = field(default_factory=QueueShares)
    """placed, and not begun on its node yet"""
    began: float = field(default_factory=time.monotonic)

    async def hear_of_nodes(self, deadline: float) -> None:
        """Returns when there is a node, or when there surely is none; at the deadline (monotonic) at the latest."""
        # Whichever node has not reported by then would be held dead, too.
        until = min(deadline, self.began + RECORD_EXPIRY)
        # The state may be shared, so that no event of this process tells.
        while time.monotonic() < until and not (await self.state.table()).live.any():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def generations(self, invocation: Invocation) -> list[Generation]:
        """One per choice, none of them begun."""
        if (adapter := invocation.target.adapter) is not None:
            self.residency.note_call(invocation.tenant, invocation.target.function, adapter)
        return [Generation(self, invocation, request) for request in invocation.requests]


class Generation:
    """One request to the nodes; what became known of it on the way is in its attributes (times: monotonic seconds)."""

    def __init__(self, dispatcher: Dispatcher, invocation: Invocation, request: GenerateRequest) -> None:
        self.shared = dispatcher
        self.invocation = invocation
        self.request = request
        self._asked = request
        """As the next node gets it: once there are tokens, it goes on behind them."""
        self.resumed = 0
        """How often it has."""
        self._attempts_begun = 0
        self.function = invocation.target.function
        self._whose = PlacedCall(invocation.id, invocation.request_id, request.tenant, self.function)
        self.received = invocation.received
        self._generated: list[int] = []
        self.node: str | None = None
        """The id of the one that has it; None before it is placed."""
        self.moved = False
        """It was moved, and is not moved again."""
        self._deadline = math.inf
        self._revoked: asyncio.Future[ServiceError]
        """Gets the reason when the call must end early. Set, as the deadline is, when the events begin."""
        self._interrupted: asyncio.Future[Exception] | None = None
        """Of the attempt that runs."""
        self.cold_start: str | None = None
        self.schedule = 0.0
        self.forecast: float | None = None
        """Seconds from `sent_at` to the first token, by the scheduler."""
        self.sent_at: float | None = None
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.done: Done | None = None
        self.done_at: float | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        """Complete when the first event comes; of the prompt's tokens but the first."""
        self.held = 0.0
        """Seconds that it waited for a first node."""
        self._waiting = False
        self._stay = dispatcher.loads.stay(invocation.received)

    async def events(self) -> AsyncGenerator[Token | Done, None]:
        """Tokens, then Done. Raises ServiceError. Must be closed (`aclosing`): that cancels the request on the node."""
        shared = self.shared
        outcome = "cancelled"
        shared.metrics.change_open(1)
        try:
            with (
                shared.running.track(self.request.tenant, self.function, self.received) as self._revoked,
                shared.migration.track(self.request.id, self),
            ):
                async with aclosing(self._attempts()) as events:
                    async for event in events:
                        self._note(event)
                        yield event
        except Exception as error:
            outcome = error.type if isinstance(error, ServiceError) else "internal"
            self.invocation.meter.fail()
            raise
        except BaseException:  # the caller has gone, or the gateway stops
            if self.done is None:
                cold = self.cold_start not in (None, "none")
                self.invocation.meter.cut(self._prompt_tokens, self.tokens, cold)
            raise
        finally:
            shared.metrics.change_open(-1)
            self._stay.end()
            self._count(outcome)

    @property
    def tokens(self) -> int:
        """Returns how many tokens have come."""
        return len(self._generated)

    @property
    def ttft(self) -> float | None:
        """Seconds from receipt to the first token."""
        return None if self.first_at is None else self.first_at - self.received

    @property
    def tpot(self) -> float | None:
        """Seconds between two tokens, on average; None before the second one."""
        if self.first_at is None or self.last_at is None or self.tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.tokens - 1)

    @property
    def used_tokens(self) -> int:
        """Returns how many of the tokens that the call may use this request has used, as far as is known now."""
        return self._prompt_tokens + (self.tokens if self.done is None else self.done.completion_tokens)

    async def place_again(self, excluded: frozenset[str]) -> Placed:
        """Reserves a place on another node than these. Raises ServiceError when there is none."""
        asked = self._from_here()
        return await self.shared.placer.place(self._whose, asked, self.received, excluded | await self._unreachable())

    def move_to(self, placed: Placed) -> bool:
        """Goes on there. Returns False when the call does not run any more."""
        if self._interrupted is None or self._interrupted.done():
            return False
        self.moved = True
        self._interrupted.set_result(Moved(placed))
        return True

    @property
    def _prompt_tokens(self) -> int:
        """Returns how many tokens of the prompt have been used: a prompt counts from its beginning on a node, and with
        its first choice only."""
        return 0 if self.request.sampling.choice or self.started_at is None else len(self.request.token_ids)

    async def _attempts(self) -> AsyncGenerator[Token | Done, None]:
        shared = self.shared
        self._deadline = time.monotonic() + self.request.timeout
        excluded: frozenset[str] = frozenset()
        failure: ServiceError | None = None
        moved: Placed | None = None
        await shared.hear_of_nodes(self._deadline)
        while True:
            if time.monotonic() >= self._deadline:
                raise failure or ServiceError("timeout", "the timeout passed before the request reached a node")
            placed = moved or await self._place_or_hold(excluded, failure)
            moved = None
            self._stay.wait(placed.pool, placed.work)
            self._wait(True)
            try:
                async with aclosing(self._attempt(placed)) as events:
                    async for event in events:
                        yield event
                return
            except Moved as move:
                moved = move.placed
                self._ask_from_here()
            except NodeFailure as error:
                log.warning("%s", error, extra={"invocation": self.request.id})
                if not self._go_on(error):
                    raise error.error from error
                failure, excluded = error.error, excluded | {placed.node_id}
                shared.metrics.count_retry()
            finally:
                self._wait(False)
                await shared.state.release(placed.node_id, self.request.id)

    def _go_on(self, failure: NodeFailure) -> bool:
        """Prepares the request for another node. Returns False when none may have it."""
        self._attempts_begun += 1
        if self.first_at is None:
            return failure.retryable and self._attempts_begun < ATTEMPTS
        if not may_resume(failure, self.resumed):
            return False
        self._ask_from_here()
        return True

    def _ask_from_here(self) -> None:
        """The next node goes on behind the tokens that there are."""
        self._asked = self._from_here()
        if self.first_at is not None:
            self.resumed += 1
            self._stay.restart()

    def _from_here(self) -> GenerateRequest:
        return self.request if self.first_at is None else resumption_of(self.request, self._generated)

    async def _attempt(self, placed: Placed) -> AsyncGenerator[Token | Done, None]:
        left, ttft = self._deadline - time.monotonic(), ttft_left(self._asked, self.received)
        request = msgspec.structs.replace(self._asked, timeout=left, ttft=ttft, place=placed.number)
        self.node = placed.node_id
        if not self.resumed:
            self.sent_at, self.started_at, self.forecast = time.monotonic(), None, placed.forecast
            self.prompt_logprobs = []
        self._interrupted = interrupted = interruptible(self._revoked)
        async with aclosing(self.shared.client.stream(placed, request, interrupted)) as events:
            async for event in events:
                if isinstance(event, Started):
                    if not self.resumed:
                        self.cold_start, self.started_at = event.cold_start, time.monotonic()
                    self._wait(False)
                    if request.adapter is not None:
                        self.shared.called.run(request.tenant, request.adapter.digest)
                elif isinstance(event, Failed):
                    raise NodeFailure(self._error_of(event), retryable=event.retryable)
                elif isinstance(event, PromptLogprobs):  # kept: another node may have to send them anew
                    self.prompt_logprobs += event.logprobs
                else:
                    yield event

    def _error_of(self, event: Failed) -> ServiceError:
        if event.damaged and event.damaged == self.invocation.target.digest:
            return self.shared.functions.remake(self.request.tenant, self.invocation.target)
        return ServiceError(event.type, event.message, retry_after=event.retry_after)

    async def _place_or_hold(self, excluded: frozenset[str], failure: ServiceError | None) -> Placed:
        """Places the request. With an autoscaler it waits for a node where there is none at all, where the only one has
        just refused the request because it is to go, and where the first one that came is full. Raises ServiceError."""
        hold, until = self.shared.hold, math.inf
        while True:
            try:
                return await self._place(excluded, failure)
            except ServiceError as error:
                began, refused = time.monotonic(), failure is None or failure.type == "unavailable"
                empty = refused and await hold.applies(excluded)
                first_node_is_full = until < math.inf and error.type == "overloaded"  # a node came while it was held
                if not empty and (not first_node_is_full or began + AGAIN_SECONDS > until):
                    raise
            until = min(until, began + hold.seconds, self._deadline)
            self._stay.wait(None, None)
            if empty and not excluded:
                await hold.wait(until, self._revoked)
            else:  # it has no place, or what it says of itself is on its way
                await asyncio.wait([self._revoked], timeout=max(0.0, min(AGAIN_SECONDS, until - began)))
            excluded, failure = frozenset(), None
            self.held += time.monotonic() - began
            self._check_held(until)

    def _check_held(self, until: float) -> None:
        """Raises ServiceError when the request may not wait any longer."""
        if self._revoked.done():
            raise self._revoked.result()
        if time.monotonic() >= self._deadline:
            raise ServiceError("timeout", "the timeout passed before a node was ready")
        if time.monotonic() >= until:
            raise self.shared.hold.given_up()

    async def _place(self, excluded: frozenset[str], failure: ServiceError | None) -> Placed:
        """Places the request on a node that is not excluded. Raises the first attempt's failure when no other node can
        take the request."""
        began = time.monotonic()
        try:
            shared, request = self.shared, self._asked
            crowded = shared.waiting.tenant_to_displace(request.tenant, request.weight)
            displaces = crowded is not None or request.slo_class == "strict" or request.reserved > 0  # as on the node
            excluded |= await self._unreachable()
            return await shared.placer.place(self._whose, request, self.received, excluded, displaces=displaces)
        except ServiceError as error:
            if error.type == "overloaded" and failure is None and not self.held:
                shared.loads.refuse(await shared.placer.refused_work(self._whose, self._asked))
            raise failure or error from None
        finally:
            self.schedule += time.monotonic() - began

    async def _unreachable(self) -> frozenset[str]:
        """Returns the ids of nodes that can't be talked to."""
        return self.shared.client.breakers.blocked(await self.shared.state.table())

    def _wait(self, waits: bool) -> None:
        """Note whether it is in a node's queue now."""
        if not waits:
            self._stay.begin()
        if waits and not self._waiting:
            self.shared.waiting.join(self.request.tenant, self.request.weight)
        elif self._waiting and not waits:
            self.shared.waiting.leave(self.request.tenant)
        self._waiting = waits

    def _note(self, event: Token | Done) -> None:
        now = time.monotonic()
        if isinstance(event, Token):
            self._generated += event.token_ids
            if self.first_at is None:
                self.first_at = now
            self.last_at = now
            return
        self.done, self.done_at = event, now
        if event.finish_reason == "timeout" and event.completion_tokens == 0:
            if self.started_at is None:
                raise ServiceError("unavailable", "the timeout passed in the node's queue", retry_after=RETRY_AFTER)
            raise ServiceError("timeout", "the timeout passed before the first token")
        if event.finish_reason in ("stop", "length"):
            self.shared.placer.lengths.note(self.request.tenant, self.function, event.completion_tokens)
        cold = event.timing.cold_start.state != "none"
        prompt, device = 0 if self.request.sampling.choice else event.prompt_tokens, event.timing.device
        self.invocation.meter.done(prompt, event.completion_tokens, cold, device)

    def _count(self, outcome: str) -> None:
        shared, tenant, done = self.shared, self.request.tenant, self.done
        ended = "ok" if done is not None and outcome == "cancelled" else outcome
        shared.metrics.count_invocation(tenant, self.function, ended)
        if ended in JUDGED:
            seen = (self.ttft, self.tpot)
            held = judge((self.request.ttft, self.request.tpot), seen, answered=ended == "ok")
            shared.attainment.note(tenant, held)
            if held:
                self._stay.judge(held["all"])
            shared.metrics.count_promises(tenant, held)
        counts = Counts(invocations=1, failures=ended not in ("ok", "cancelled"))
        if done is not None:
            counts.prompt_tokens, counts.completion_tokens = done.prompt_tokens, done.completion_tokens
            shared.metrics.count_tokens(
                tenant, self.function, done.prompt_tokens, done.completion_tokens, done.cached_tokens
            )
            shared.metrics.count_cold_start(done.timing.cold_start)
            log_call(self.request, done, self.received)
            shared.metrics.count_preemptions(tenant, done.timing.preemptions)
        if self.forecast is not None and self.sent_at is not None and self.first_at is not None:
            shared.metrics.observe_forecast(self.forecast, self.first_at - self.sent_at)
        if self.ttft is not None:
            counts.first_tokens, counts.ttft_seconds = 1, self.ttft
            shared.metrics.observe_speed(tenant, self.function, self.ttft, self.tpot)
        shared.last_hour.note(tenant, self.function, counts)
