"""Open cold passes: prompt chunks that are computed while their adapter is still loading."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from node_agent.coldstart.cold_lora import ColdLora
from node_agent.coldstart.cold_starts import ColdStarts
from node_agent.coldstart.learning import Outcome
from node_agent.coldstart.planner import Contention
from node_agent.device import EventWatch, record_event, unless_out_of_memory
from node_agent.device_event import ENDED, Event
from node_agent.engine.pulse import Pulse
from node_agent.engine.request import ColdPhases, Request
from node_agent.engine.rows import Row, share_out
from node_agent.leases import Lease
from node_agent.states import RequestState
from node_agent.types import ModelRunner, Pass, Plan, StepOutput

log = logging.getLogger("garnish.engine")

TYPICAL_ANSWER = 12
"""Assumed number of tokens of an answer, unless `max_tokens` is smaller."""

StartPass = Callable[[Row, Plan], tuple[Pass, ColdLora, Plan]]
Book = Callable[[list[Row], StepOutput], None]


@dataclass(eq=False)
class ColdPass:
    """Started and unfinished pass of one prompt chunk, with one row and one lease."""

    row: Row
    lease: Lease
    run: Pass
    lora: ColdLora
    plan: Plan
    phases: ColdPhases
    started_at: float
    """start of its planning, in monotonic seconds"""
    stalled_at: float = 0.0
    """start of its current wait for adapter bytes, in monotonic seconds; 0 if it is not waiting"""
    exposed: float = 0.0
    """seconds of all its waits for adapter bytes"""
    layers_s: float = 0.0
    """seconds spent computing or enqueueing its layers, including waits for workers"""
    enqueued: Event = ENDED
    """event that ends when the layers enqueued so far are computed"""
    watched: Event = ENDED
    """latest of these events whose end wakes the engine"""

    @property
    def plan_now(self) -> Plan:
        """Returns the pass's plan as it applies now. While the device still computes earlier layers, CPU workers get no
        layer that is planned to be loaded: whether they compute it is decided once the device reaches it."""
        if self.enqueued.query():
            return self.plan
        return replace(self.plan, cpu_extra=(inf,) * len(self.plan.cpu_extra))

    @property
    def cpu_left(self) -> float:
        """Returns the planned seconds by which CPU workers lengthen the layers of the pass that are not computed
        yet."""
        return sum(max(0.0, extra) for extra in self.plan.cpu_extra[self.run.layer : self.plan.assisted])

    def resume(self, now: float) -> None:
        """Ends the pass's wait for adapter bytes, if any, and records its duration."""
        if self.stalled_at:
            self.exposed += now - self.stalled_at
            self.phases.exposed += now - self.stalled_at
        self.stalled_at = 0.0

    def outcome(self, now: float) -> Outcome:
        """Returns the planned and measured times of the finished pass."""
        return Outcome(
            self.row.request.id, self.plan.name, self.row.length, self.plan.seconds, now - self.started_at,
            self.plan.exposed, self.exposed, self.lora.waited, self.layers_s - self.lora.waited,
            self.lora.layers_on_cpu, self.lora.layers_on_device,
            self.plan.other_requests, self.plan.by_profile,
        )  # fmt: skip


class ColdPasses:
    """Open cold passes, at most `limit`, in order of their start."""

    def __init__(
        self,
        cold_start: ColdStarts,
        start: StartPass,
        book: Book,
        runner: ModelRunner,
        pulse: Pulse,
        events: EventWatch,
        limit: int,
    ) -> None:
        """`start` begins a pass with its LoRA. `book` records the results of a pass. `events` wakes the engine when a
        watched event ends."""
        self.cold_start, self.device, self.num_layers, self.limit = cold_start, runner.device, runner.num_layers, limit
        self._start, self._book, self._pulse, self._events = start, book, pulse, events
        self.open: list[ColdPass] = []
        self.replays = 0

    @property
    def requests(self) -> list[Request]:
        """Returns the requests with open passes."""
        return [cold.row.request for cold in self.open]

    @property
    def full(self) -> bool:
        return len(self.open) >= self.limit

    def plan(self, running: Collection[Request], is_loaded: Callable[[Request], bool], chunk_tokens: int) -> None:
        """Plans the next chunk of each prompt whose adapter is loading, best effort last, while passes may be
        opened."""
        for request in sorted(running, key=lambda request: request.slo_class == "best_effort"):
            if self.full:
                return
            if request.decoding or request.in_cold_pass or request.awaits_adapter or is_loaded(request):
                continue
            peers = [peer for peer in running if peer is not request]
            self._begin(request, min(request.uncomputed, chunk_tokens), len(peers), sum(map(is_loaded, peers)))

    def _begin(self, request: Request, length: int, other_requests: int, ready: int) -> None:
        """Plans the request's next `length` tokens. Opens a pass for them unless the plan is to wait for the whole
        adapter.

        `other_requests`: number of other running requests; `ready`: how many of them have their adapters on the device.
        """
        assert request.lease is not None and request.cold is not None
        phases = request.cold
        started_at = time.monotonic()
        ahead = sum(
            self.cold_start.warm_seconds(cold.row.length, self.num_layers - cold.run.layer) + cold.cpu_left
            for cold in self.open
        )
        row = Row(request, length)
        decodes = min(request.max_tokens - 1, TYPICAL_ANSWER) if row.wants_logits else 0
        plan = self.cold_start.plan(request.lease, length, Contention(ahead, other_requests, ready, decodes))
        started = unless_out_of_memory(lambda: self._start(row, plan)) if plan.name != "wait" else None
        if started is None:
            # a hot pass computes the chunk later, with other rows, and with fewer tokens if memory is short
            request.change_state(RequestState.AWAITING_ADAPTER)
            return
        run, lora, plan = started
        if phases.plan == "wait":
            phases.plan, phases.forecast = plan.name, phases.exposed + plan.exposed + plan.rest
        request.change_state(RequestState.COLD_PREFILLING)
        phases.opened = True
        self.open.append(ColdPass(row, request.lease, run, lora, plan, phases, started_at))

    def advance(self, tokens: int) -> int:
        """Advances the open passes as far as possible, in order of their start, best effort last. Returns the number of
        prompt tokens whose computation takes as long in a warm pass.

        `tokens`: number of these tokens at which it stops, since cold passes delay all other requests. At least one
        stretch of layers is computed in any case. Later passes use what earlier ones leave: if passes took turns
        instead, all would end as late as the last.
        """
        budget = remaining = max(tokens * self.num_layers, max((cold.row.length for cold in self.open), default=0))
        while (chosen := self._next()) is not None and remaining >= chosen[0].row.length:
            cold, ready = chosen
            cold.resume(time.monotonic())
            before = cold.run.layer
            upto = min(ready, self._stop_before(cold.run, before + max(cold.run.stretch, remaining // cold.row.length)))
            remaining -= (upto - before) * cold.row.length
            started_at = time.perf_counter()
            output = unless_out_of_memory(partial(self._compute, cold, upto))
            cold.enqueued = record_event(self.device, sleeps=True)
            share_out(time.perf_counter() - started_at, [cold.row])
            self._take_stock(cold, output)
        return -(-(budget - remaining) // self.num_layers)

    def _next(self) -> tuple[ColdPass, int] | None:
        """Returns the first pass that can continue, and the layer up to which it can. Records the others as stalled."""
        first: tuple[ColdPass, int] | None = None
        for cold in sorted(self.open, key=lambda cold: cold.row.request.slo_class == "best_effort"):
            ready = self._stop_before(cold.run, self.cold_start.ready_until(cold.lease, cold.plan_now, cold.run.layer))
            if ready <= cold.run.layer:
                if cold.enqueued.query():
                    cold.stalled_at = cold.stalled_at or time.monotonic()
                elif cold.watched is not cold.enqueued:  # it may continue when the device has caught up
                    cold.watched = cold.enqueued
                    self._events.watch(cold.enqueued)
            elif first is None:
                first = cold, ready
        return first

    def _stop_before(self, run: Pass, layer: int) -> int:
        """Returns the last stopping point of the pass at or before `layer`."""
        return layer if layer == self.num_layers else layer // run.stretch * run.stretch

    def book_loads(self, requests: Iterable[Request]) -> None:
        """Records the load times and waits of those requests whose adapters have been loaded."""
        store = self.cold_start.store
        for request in requests:
            cold, lease = request.cold, request.lease
            if lease is None or cold is None or not store.loaded(lease):
                continue
            if request.awaits_adapter:
                request.change_state(RequestState.RUNNING)
            if cold.load:
                continue
            cold.load, cold.fetch = store.load_seconds(lease), store.fetch_seconds(lease)
            if not cold.fetch:
                self.cold_start.learn_load(*store.crossing(lease))
            cold.end_wait(time.monotonic())

    def begin_waits(self, requests: Iterable[Request]) -> None:
        """Starts the wait of requests whose next step needs the whole adapter, and which no cold pass can compute
        without it."""
        now = time.monotonic()
        for request in requests:
            cold, lease = request.cold, request.lease
            if lease is None or cold is None or cold.load or self.cold_start.store.loaded(lease):
                continue
            if request.decoding or request.awaits_adapter:
                cold.waits_since = cold.waits_since or now

    def drop(self, request: Request) -> list[Event]:
        """Aborts the request's pass, if any. Returns the events after which its resources are free."""
        passes = [cold for cold in self.open if cold.row.request is request]
        for cold in passes:
            self.open.remove(cold)
            cold.resume(time.monotonic())
            cold.lora.close()
        return [cold.run.abort() for cold in passes]

    def _compute(self, cold: ColdPass, upto: int) -> StepOutput | bool:
        """Computes the pass up to layer `upto`, and its output after the last layer.

        Returns the output; True if layers remain; False if a failed worker has made the values of the pass invalid.
        """
        with self._pulse.computing("cold layers", cold.row.length, upto - cold.run.layer):
            started_at = time.perf_counter()
            cold.run.advance(upto)
            cold.layers_s += time.perf_counter() - started_at
        if cold.lora.poisoned or upto < self.num_layers:
            return not cold.lora.poisoned
        with self._pulse.computing("cold end", cold.row.length):
            output = cold.run.finish()
            output.done.synchronize()  # only now does a GPU know whether a handoff failed
        return output

    def _take_stock(self, cold: ColdPass, output: StepOutput | bool | None) -> None:
        """Records a finished pass, and drops one that has failed. `output`: as from `_compute`, or None if the pass ran
        out of memory."""
        if output is True:
            return
        request = cold.row.request
        self.open.remove(cold)
        cold.lora.close()
        cold.phases.layers_cpu += cold.lora.layers_on_cpu
        cold.phases.layers_device += cold.lora.layers_on_device
        if isinstance(output, bool | None) or cold.lora.poisoned:
            cold.run.abort().synchronize()
            request.change_state(RequestState.AWAITING_ADAPTER)
            if cold.lora.poisoned:
                log.warning("request %s: a CPU worker failed; the chunk is computed again", request.id)
                cold.phases.replays += 1
                self.replays += 1
        else:
            request.change_state(RequestState.RUNNING)
            self.cold_start.observe(cold.lease, cold.outcome(time.monotonic()))
            self._book([cold.row], output)
