"""Base class of both engines of a node: requests from arrival to end, whatever computes their tokens."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

from cluster.messages import GenerateRequest
from cluster.news import VllmLoad
from node_agent.device_event import Event
from node_agent.engine.adapter_tiers import AdapterTiers
from node_agent.engine.events import end_of, expired, finished
from node_agent.engine.grammars import Grammars
from node_agent.engine.intake import problem_of, request_of
from node_agent.engine.library_metrics import metrics_answer
from node_agent.engine.limits import Limits
from node_agent.engine.orders import Orders
from node_agent.engine.prefetcher import Prefetcher
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.pulse import Pulse
from node_agent.engine.request import ColdPhases, Request
from node_agent.engine.scheduler import Scheduler
from node_agent.idle_work import IdleWork
from node_agent.ipc import Admitted, EngineEvent, Generated, Question, ReadMetrics, Ready, Top
from node_agent.leases import LoadFailed
from node_agent.performance.drift import Drift
from node_agent.states import RequestState

log = logging.getLogger("garnish.engine")


class EngineBase(ABC):
    """Engine that owns the requests: queue, admission, deadlines, adapters and ends. Subclasses compute the tokens. One
    thread calls all methods."""

    def __init__(
        self, limits: Limits, store: AdapterTiers, prefixes: Prefixes, eos_ids: frozenset[int], pulse: Pulse
    ) -> None:
        self.pulse = pulse
        self.limits, self.store, self.eos_ids = limits, store, eos_ids
        self.prefixes, self.blocks = prefixes, prefixes.blocks
        self.running: dict[str, Request] = {}
        self.scheduler = Scheduler(limits, self.running, prefixes, store)
        self.queue = self.scheduler.queue
        self.prefetcher = Prefetcher(store, limits.prefetch_waste)
        self.orders = Orders(store, self.prefetcher)
        self.drift: Drift | None = None
        """Performance model that the node publishes, with its corrections; None if it has none."""
        self.measuring: float | None = None
        """Finished share, 0 to 1, of a running measurement of the performance model; None: none is running."""
        self.worker_manager: IdleWork | None = None
        """Starts and measures the CPU LoRA workers; None if the engine has none."""
        self.grammars: Grammars | None = None
        """Compiler of the requests' grammars; None if whatever computes the tokens follows them."""
        self._events: list[EngineEvent] = []

    # --- what a subclass defines

    @abstractmethod
    def _start(self, request: Request) -> None:
        """Prepares the computation of a request that was admitted."""

    @abstractmethod
    def _stop(self, request: Request) -> list[Event]:
        """Ends the computation of a running or waiting request. Returns the events after which its adapter and KV
        blocks are free."""

    def compute_cold(self) -> int:
        """Computes passes of requests whose adapters are loading. Returns the number of prompt tokens whose computation
        takes as long in a warm pass. Does nothing if tokens are computed in other threads or processes."""
        return 0

    def compute_hot(self, used: int) -> Iterator[None]:  # noqa: ARG002
        """Computes the other passes of an iteration. Yields after each, so that its events can be sent before the next
        one. `used`: prompt tokens of the iteration that cold passes have used."""
        return iter(())

    def ready_now(self, ready: Ready) -> Ready:
        """Returns the message with what has changed since the start."""
        return ready

    @property
    def vllm_load(self) -> VllmLoad | None:
        """Returns vLLM's own figures; None if the engine does not drive vLLM."""
        return None

    def library_metrics(self) -> bytes | None:
        """Returns the metrics of the library that computes the tokens, as Prometheus text; None if there is no such
        library."""
        return None

    def heal(self) -> list[str]:
        """Checks and repairs adapter memory while the engine is idle. Returns what was damaged."""
        return []

    # --- interface of the engine process

    def submit(self, message: GenerateRequest) -> None:
        """Queues a request and starts its adapter's load, or finishes it at once with an error."""
        request = request_of(message)
        problem = self._problem(request)
        if problem is not None:
            self._finish(request, "error", *problem)
            return
        grammar = request.sampling.grammar
        if grammar is not None and self.grammars is not None:
            request.grammar = self.grammars.start(grammar, request.tokens[request.prompt_len :])
        ended = end_of(request, self.eos_ids) if request.generated else None
        if ended is not None:  # the previous node failed before it could report the end
            self._finish(request, ended)
            return
        request.after_idle = self.scheduler.callers.record_call(request)
        if request.adapter is not None:
            request.arrival_tier = self.store.announce(request.adapter, tenant=request.tenant)
            self.prefetcher.record_call(request.adapter.digest)
        self.queue.add(request)

    def cancel(self, request_id: str) -> None:
        """Cancels the request unless it has already ended."""
        request = self.running.get(request_id) or self.queue.get(request_id)
        if request is not None:
            self._finish(request, "cancelled")

    def cancel_all(self) -> None:
        for request in [*self.queue, *self.running.values()]:
            self._finish(request, "cancelled")

    def answer(self, question: Question) -> None:
        """Takes a question. `take_events` returns its answer, which for a prefetch may take long."""
        if isinstance(question, ReadMetrics):
            self._events.append(metrics_answer(question.id, self.library_metrics))
        else:
            self.orders.take(question)

    def prepare(self) -> None:
        """Runs the fast part of an iteration: records arrivals, ends expired requests, and admits others. Its events
        can be sent before the slow part begins."""
        self._poll()
        self._expire()
        self._fail_grammars()
        self._admit()
        self.orders.poll(may_place=not self.queue)
        self.prefetcher.poll()

    def take_events(self) -> list[EngineEvent]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        return [*events, *self.orders.answers()]

    def put_back(self, events: list[EngineEvent]) -> None:
        """Puts events back that another caller should get. The next `take_events` returns them first."""
        self._events[:0] = events

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.running)

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline in monotonic seconds; None without requests."""
        return min((r.deadline for r in [*self.queue, *self.running.values()]), default=None)

    # --- inside an iteration

    def _poll(self) -> None:
        """Records what other threads have done since the last iteration."""
        self.store.poll()
        self.blocks.poll()

    def _problem(self, request: Request) -> tuple[str, str] | None:
        if request.id in self.running or self.queue.get(request.id):
            return "conflict", f"request {request.id} is running already"
        problem = problem_of(request, self.limits, self.blocks)
        if problem is not None or not self.queue.full:
            return problem
        full = "overloaded", f"{self.limits.queue_limit} requests are queued on this node"
        displaced = self.queue.displaced_by(request)
        if displaced is None:
            return full
        self._finish(displaced, "error", *full)
        return None

    def _expire(self) -> None:
        now = time.monotonic()
        for request in [r for r in [*self.queue, *self.running.values()] if now >= r.deadline]:
            self._finish(request, *expired(request))

    def _fail_grammars(self) -> None:
        """Ends requests whose grammar can't be compiled, or not be followed any more."""
        for request in [r for r in [*self.queue, *self.running.values()] if r.grammar is not None]:
            problem = request.grammar.problem if request.grammar is not None else ""
            if problem:
                self._fail_grammar(request, problem)

    def _fail_grammar(self, request: Request, problem: str) -> None:
        if self.grammars is not None and request.sampling.grammar is not None:
            self.grammars.forget(request.sampling.grammar, request.grammar.slow if request.grammar else "")
        self._finish(request, "error", "validation_failed", f"the output's form can't be kept: {problem}")

    def _admit(self) -> None:
        if not self.queue:
            return
        admission = self.scheduler.admit(self.limits.max_rows, self._preempt)
        for request in admission.admitted:
            self._stop_awaiting_adapter(request)
            self._begin(request)
        for entry in admission.refused:
            log.warning("request %s is refused: %s %s", entry.request.id, entry.message, entry.cause)
            self._stop_awaiting_adapter(entry.request)
            self._finish(entry.request, "error", entry.type, entry.message, damaged=entry.damaged)

    def _begin(self, request: Request) -> None:
        """Starts a request that has been admitted."""
        now = time.monotonic()
        waited = request.held_s or (request.cold is not None and not request.cold.load)
        if request.lease is not None and (waited or not self.store.loaded(request.lease)):
            request.cold = ColdPhases(now, exposed=request.cold.exposed if request.cold else request.held_s)
            if not request.admitted and request.arrival_tier == "none":
                request.arrival_tier = self.store.source(request.lease)
        self.running[request.id] = request
        request.change_state(RequestState.RUNNING)
        self._start(request)
        if not request.admitted:
            request.admitted = now
            request.cached_tokens = request.found_tokens
            self._events.append(Admitted(request.id, request.arrival_tier))

    def _preempt(self, request: Request) -> None:
        """Preempts a running request: frees its resources and queues it again. Its generated tokens stay; they are
        computed again together with its prompt."""
        after = self._stop(request)
        if request.cold is not None and not request.cold.load:
            request.cold.end_wait(time.monotonic())
        if request.adapter is not None:
            # before its lease ends, otherwise a running load would be cancelled
            self.store.announce(request.adapter, tenant=request.tenant)
        self._free(request, after)
        request.begin_again()
        del self.running[request.id]
        self.queue.add(request)

    def _free(self, request: Request, after: list[Event]) -> None:
        """Frees the request's lease and blocks once these events have ended."""
        if request.lease is not None:
            self.store.release(request.lease, after, served=bool(request.first_token))
            request.lease = None
        self.blocks.release(request.blocks, after)
        request.blocks = []

    def _stop_awaiting_adapter(self, request: Request) -> None:
        if request.adapter is not None:
            self.store.retract(request.adapter.digest)

    def _is_loaded(self, request: Request) -> bool:
        """Returns whether the whole adapter is on the device, or the request has none."""
        return request.lease is None or self.store.loaded(request.lease)

    def _fail_loads(self) -> None:
        for request in list(self.running.values()):
            if request.cold is not None and not request.cold.load and request.lease is not None:
                failure = self.store.failure(request.lease)
                if failure is not None:
                    self._fail_load(request, failure)

    def _take_token(self, request: Request, token: int, top: Top | None) -> None:
        now = time.monotonic()
        self.prefixes.learn(request)
        if not request.generated and now >= request.deadline:
            self._finish(request, "error", "timeout", "no token was ready before the deadline")
            return
        request.first_token = request.first_token or now
        request.tokens.append(token)
        if request.rules is not None:
            request.rules.append_token(token)
        if request.grammar is not None:
            request.grammar.append_token(token)
            if problem := request.grammar.problem:  # its mask may have allowed the end token alone
                self._fail_grammar(request, problem)
                return
        self._events.append(Generated(request.id, token, top))
        self.queue.charge_token(request)
        ended = end_of(request, self.eos_ids)
        if ended is not None:
            self._finish(request, ended)

    # --- how requests end

    def _fail_load(self, request: Request, failure: LoadFailed) -> None:
        assert request.adapter is not None
        log.warning("load of %s failed: %s", request.adapter.digest, failure.reason)
        message = f"adapter {request.adapter.digest[:12]} could not be loaded on this node"
        self._finish(request, "error", "unavailable", message, damaged=failure.damaged)

    def _finish(
        self, request: Request, reason: str, error_type: str = "", error: str = "", *, damaged: bool = False
    ) -> None:
        """Frees all resources of the request, then emits its end."""
        self._free(request, self._stop(request))
        if self.running.get(request.id) is request:
            del self.running[request.id]
        elif self.queue.get(request.id) is request:
            self.queue.remove(request)
            self._stop_awaiting_adapter(request)
        request.change_state(RequestState.FINISHED)
        if not self.busy:
            self.queue.shares.reset()
        self._events.append(finished(request, reason, error_type, error, damaged=damaged))
