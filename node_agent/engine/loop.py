"""The engine: continuous batching at iteration level, with hot and cold passes (docs/design/seams.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator

from cluster.messages import GenerateRequest
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.assist import Assist
from node_agent.coldstart.cold_lora import ColdLora
from node_agent.coldstart.cold_starts import ColdStarts
from node_agent.device import Event, EventWatch
from node_agent.engine.batch import Row, build_lora, build_step
from node_agent.engine.cold import ColdPasses
from node_agent.engine.events import end_of, expired, finished, score_events, split_scores
from node_agent.engine.hot import Computed, HotPasses, OutOfMemory
from node_agent.engine.intake import problem_of, request_of, rules_of
from node_agent.engine.joining import Joined, Joining
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.limits import Limits
from node_agent.engine.orders import Orders
from node_agent.engine.overlap import Overlap
from node_agent.engine.prefetcher import Prefetcher
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.pulse import Pulse
from node_agent.engine.request import ColdPhases, Request
from node_agent.engine.scheduler import HotRows, Scheduler
from node_agent.ipc import Admitted, EngineEvent, Generated, Top
from node_agent.performance.drift import Drift
from node_agent.runner.lora_choice import LoraCode
from node_agent.runner.prompt_scores import all_finite
from node_agent.sending_runner import batch_device
from node_agent.states import RequestState
from node_agent.types import IdleWork, LoadFailed, ModelRunner, Pass, PassLora, Plan, StepBatch, StepOutput

log = logging.getLogger("garnish.engine")


class Engine:
    """Engine that owns the requests. One thread calls all methods; `step` runs one iteration."""

    def __init__(
        self,
        limits: Limits,
        runner: ModelRunner,
        store: AdapterStore,
        cold_start: ColdStarts,
        eos_ids: frozenset[int],
        lora: LoraCode,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when a pass that waits for adapter bytes may continue; any thread may call it."""
        self.limits, self.runner, self.store, self.eos_ids = limits, runner, store, eos_ids
        self.start_lora, self.lora_kernel = lora.start, lora.kernel
        self.blocks = BlockPool(runner.num_blocks, runner.block_tokens)
        self.prefixes = Prefixes(self.blocks, limits.prefix_cache)
        self.running: dict[str, Request] = {}
        self.scheduler = Scheduler(limits, self.running, self.prefixes, store)
        self.queue = self.scheduler.queue
        self.pulse = Pulse(compiles=runner.device.type != "cpu")
        self._device_events = EventWatch(on_change)
        self.cold = ColdPasses(
            cold_start, self._start_cold, self._book, runner, self.pulse, self._device_events, limits.max_cold
        )
        self.joining = Joining(self.cold, runner, lambda batch, decodes: self.start_lora(batch, decodes))
        self.hot = HotPasses(runner, self._tensors, self.pulse)
        self.overlap = Overlap(self.hot, runner, self.running)
        self.prefetcher = Prefetcher(store, limits.prefetch_waste)
        self.orders = Orders(store, self.prefetcher)
        self.worker_manager: IdleWork | None = None
        """Starts and measures the CPU LoRA workers; None until the engine is set up."""
        self.drift: Drift | None = None
        """Performance model that the node publishes, with its corrections; None if it has none."""
        self.measuring: float | None = None
        """Finished share, 0 to 1, of a running measurement of the performance model; None: none is running."""
        self._events: list[EngineEvent] = []

    @property
    def cold_start(self) -> ColdStarts:
        return self.cold.cold_start

    @property
    def assist(self) -> Assist | None:
        """Returns the engine's interface to the CPU LoRA workers; None if there are none."""
        return self.cold_start.assist

    def close(self) -> None:
        """Closes the workers, threads and memory that the engine owns. No step may be running."""
        self._device_events.close()
        if self.worker_manager is not None:
            self.worker_manager.close()
        if self.assist is not None:
            self.assist.workers.close()
        self.store.close()

    # --- interface of the engine process

    def submit(self, message: GenerateRequest) -> None:
        """Queues a request and starts its adapter's load, or finishes it at once with an error."""
        request = request_of(message)
        problem = self._problem(request)
        if problem is not None:
            self._finish(request, "error", *problem)
            return
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

    def step(self) -> bool:
        """Runs one iteration. Returns whether anything was computed. If not, the caller waits for a message, a load or
        a deadline."""
        self.prepare()
        used = self.compute_cold()
        return len(list(self.compute_hot(used))) > 0 or used > 0

    def prepare(self) -> None:
        """Runs the fast part of an iteration: records arrivals, ends expired requests, and admits others. Its events
        can be sent before the slow part begins."""
        self.store.poll()
        if self.assist is not None:
            self.assist.poll()
        self.blocks.poll()
        self._expire()
        self._admit()
        self.orders.poll(may_place=not self.queue)
        self.prefetcher.poll()

    def compute_cold(self) -> int:
        """Computes the cold passes, before the hot ones. Returns the number of prompt tokens whose computation takes as
        long in a warm pass.

        If the events are sent at once, the first token of a loading adapter does not wait for other requests' next
        tokens.
        """
        self._fail_loads()
        self.cold.book_loads(self.running.values())
        if self._blocked():
            return 0
        self.cold.plan(self.running.values(), self._is_loaded, self.limits.chunk_tokens)
        return self.cold.advance(self.scheduler.cold_tokens(self.limits, self.drift, self.cold.requests))

    def compute_hot(self, used: int) -> Iterator[None]:
        """Computes the hot passes of an iteration. Yields after each, so that its events can be sent before the next
        one. `used`: prompt tokens of the iteration that cold passes have used."""
        self.overlap.end_dropped()
        if self.overlap.under_way:
            self._book_computed(*self.overlap.compute())
            yield
        elif not self._blocked():
            self.cold.begin_waits(self.running.values())
            joining = self.joining.choose(self.running.values(), self._is_loaded)
            for rows in self.scheduler.compose(self.limits, used, self._is_loaded, self.drift, joining):
                if not joining and self.overlap.begin(rows.rows, rows.n_decode):
                    self._book_computed(*self.overlap.compute())
                else:
                    self._compute_hot(rows)
                yield

    def _compute_hot(self, chosen: HotRows) -> None:
        joined = self.joining.open(chosen.rows)
        rows = [row for row in chosen.rows if row not in joined.left_out]
        computed: Computed | OutOfMemory | None = None
        try:
            if rows:
                computed = self.hot.compute(rows, chosen.n_decode - len(joined.left_out), joined)
        finally:
            failed = joined.close(isinstance(computed, Computed))
        if isinstance(computed, Computed):
            self._book_computed(computed, failed)
        elif computed is not None and computed.is_hopeless:
            text = "this node has too little memory to compute the request"
            self._finish(computed.rows[0].request, "error", "unavailable", text)

    def _book_computed(self, computed: Computed, failed: Collection[Row]) -> None:
        if self.drift is not None:
            self.drift.observe(computed.rows, computed.n_decode, computed.seconds)
        self._book(computed.rows, computed.output, failed)

    def _blocked(self) -> bool:
        """Returns whether the engine computes nothing now. This happens only in the baseline mode that stalls while a
        running request's adapter loads."""
        return self.cold_start.mode.blocks and any(not self._is_loaded(r) for r in self.running.values())

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

    def _admit(self) -> None:
        if not self.queue:
            return
        admission = self.scheduler.admit(self.limits.max_rows, self._preempt)
        for request in admission.admitted:
            self._retract(request)
            self._begin(request)
        for entry in admission.refused:
            log.warning("refused %s: %s %s", entry.request.id, entry.message, entry.cause)
            self._retract(entry.request)
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
        request.rules = request.rules or rules_of(request, self.eos_ids, batch_device(self.runner))
        if not request.admitted:
            request.admitted = now
            self._events.append(Admitted(request.id, request.arrival_tier, request.found_tokens))

    def _preempt(self, request: Request) -> None:
        """Preempts a running request: frees its resources and queues it again. Its generated tokens stay; they are
        computed again together with its prompt."""
        if request.cold is not None and not request.cold.load:
            request.cold.end_wait(time.monotonic())
        if request.adapter is not None:
            # before its lease ends, otherwise a running load would be cancelled
            self.store.announce(request.adapter, tenant=request.tenant)
        self._free(request, self.overlap.drop(request))
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

    def _retract(self, request: Request) -> None:
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

    def _start_cold(self, row: Row, plan: Plan) -> tuple[Pass, ColdLora, Plan]:
        """Starts a cold pass. Returns the pass, its LoRA, and its plan, which differs from the given one if no workers
        are free."""
        lease = row.request.lease
        assert lease is not None
        batch, on_device = self._tensors([row], 0)
        assert on_device is not None  # a cold row has an adapter
        assist = self.assist if plan.name == "assist" else None
        workers = assist.begin(lease, self.store.layout(lease)) if assist is not None else None
        if workers is None and plan.name == "assist":
            plan = self.cold_start.without_workers(lease, plan)
        lora = self.cold_start.lora(lease, on_device, workers)
        try:
            return self.runner.start(batch, lora), lora, plan
        except BaseException:
            lora.close()
            raise

    def _tensors(
        self, rows: list[Row], n_decode: int, joined: Joined | None = None
    ) -> tuple[StepBatch, PassLora | None]:
        device = batch_device(self.runner)
        batch = build_step(rows, n_decode, self.runner.block_tokens, device)
        if joined:
            return batch, joined.lora(rows, n_decode == batch.n_tokens)
        lora = build_lora(rows, device)
        return batch, None if lora.empty else self.start_lora(lora, n_decode == batch.n_tokens)

    def _book(self, rows: list[Row], output: StepOutput, failed: Collection[Row] = ()) -> None:
        """Records the results of a finished pass: prompt scores, computed tokens and new tokens. Rows in `failed` are
        skipped. A request that has ended, or that its prompt scores end, gets no new token."""
        output.done.synchronize()
        tokens = output.token_ids.tolist()
        sampled = [row for row in rows if row in failed or row.wants_logits]
        for request, places, scores in split_scores(rows, output.prompt_scores):
            if self.running.get(request.id) is not request:
                continue
            if all_finite(scores):
                request.scored = places.stop
                self._events += score_events(request, places, scores)
            else:
                self._fail_numbers(request)
        for row in rows:
            if row not in failed:
                row.request.computed += row.length
        for i, (row, token) in enumerate(zip(sampled, tokens, strict=True)):
            if row in failed or self.running.get(row.request.id) is not row.request:
                continue
            if i in output.non_finite:
                self._fail_numbers(row.request)
            else:
                logprobs = output.logprobs[i]
                self._take_token(row.request, token, Top(*logprobs) if logprobs else None)

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
        self._events.append(Generated(request.id, token, top))
        self.queue.charge_token(request)
        ended = end_of(request, self.eos_ids)
        if ended is not None:
            self._finish(request, ended)

    # --- how requests end

    def _fail_numbers(self, request: Request) -> None:
        log.error("request %s: logits are not finite", request.id)
        self._finish(request, "error", "internal", "the model's output was not finite")

    def _fail_load(self, request: Request, failure: LoadFailed) -> None:
        assert request.adapter is not None
        log.warning("load of %s failed: %s", request.adapter.digest, failure.reason)
        message = f"adapter {request.adapter.digest[:12]} could not be loaded on this node"
        self._finish(request, "error", "unavailable", message, damaged=failure.damaged)

    def _finish(
        self, request: Request, reason: str, error_type: str = "", error: str = "", *, damaged: bool = False
    ) -> None:
        """Frees all resources of the request, then emits its end."""
        self.cold.book_loads([request])  # include load times since the last iteration
        self._free(request, [*self.cold.drop(request), *self.overlap.drop(request)])
        if self.running.get(request.id) is request:
            del self.running[request.id]
        elif self.queue.get(request.id) is request:
            self.queue.remove(request)
            self._retract(request)
        request.change_state(RequestState.FINISHED)
        if not self.busy:
            self.queue.shares.reset()
        self._events.append(finished(request, reason, error_type, error, damaged=damaged))
