"""The API process's registry of requests in flight, and its view of the engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cluster.errors import ServiceError
from cluster.messages import GenerateRequest
from cluster.news import NodeRecord, NodeReport, StrictRoom, full_report, rank_sums
from cluster.queue_shares import QueueShares, room_for_others
from cluster.received import Received
from cluster.residency import WantedResidency
from node_agent.api.engine_link import EngineLink, LinkDown
from node_agent.api.questions import Questions
from node_agent.api.reply import RETRY_AFTER, RequestEvent
from node_agent.api.request import Limits, check_request
from node_agent.api.residency_log import ResidencyLog
from node_agent.config import NodeConfig
from node_agent.exit_note import clear_exit, read_exit
from node_agent.gpu.watch import GpuWatch
from node_agent.ipc import (
    Admitted,
    Answer,
    Cancel,
    Command,
    EngineEvent,
    Finished,
    Generated,
    PrefetchHints,
    PromptScored,
    Question,
    Ready,
    Stats,
    Submit,
)

EVENT_LIMIT = 4096
"""Maximum events of one request waiting for a slow reader; beyond it the request is cancelled."""
BACKSTOP = 5.0
"""Seconds after a request's deadline at which this process ends the request. Normally the engine has ended it at the
deadline."""
SILENT_S = 2.0
"""Seconds by which a heartbeat must be overdue for the engine to get no new requests."""
FAILED_S = 5.0
"""Seconds by which a heartbeat must be overdue for the engine's requests to fail, as if it had exited."""

NO_STATS = Stats(
    running=0, queued=0, kv_blocks_free=0, adapter_bytes_free=0, batch_ranks=[], batch_contexts=[], residents=[]
)
"""Stats that are used while the engine has sent none."""
OF_READY = {*Ready.__struct_fields__} & {*NodeRecord.__struct_fields__}
"""Fields of a record that are copied from Ready."""
OF_STATS = {*Stats.__struct_fields__} & {*NodeRecord.__struct_fields__} - {
    "running", "queued", "prompt_tokens_left", "strict"
}  # fmt: skip
"""Fields of a record that are copied from the engine's last snapshot. The other fields also count this process's
requests."""

log = logging.getLogger(__name__)


class Ended(ServiceError):
    """Raised when the engine will send nothing more about this request."""


class InFlight:
    """Request that was sent to the engine and has not finished."""

    def __init__(self, request: GenerateRequest) -> None:
        self.id, self.tenant = request.id, request.tenant
        self.prompt_tokens = len(request.token_ids) + len(request.generated)
        """number of prompt tokens to compute before its next token"""
        self.rank = request.adapter.max_rank if request.adapter is not None else 0
        self.slo_class = request.slo_class
        self.admitted = False
        self.pictured = False
        """whether the engine's last snapshot counts the request in the batch"""
        self.timer: asyncio.TimerHandle | None = None
        self._events: deque[RequestEvent] = deque()
        self._ended: Ended | None = None
        self._wakeup = asyncio.Event()
        self._cancelled = False

    async def events(self) -> list[RequestEvent]:
        """Waits for events of the request, and returns all since the last call. The registry's timer bounds the wait.
        Raises Ended once the last event of an ended request was returned."""
        await self._wakeup.wait()
        self._wakeup.clear()
        if self._events:
            events = list(self._events)
            self._events.clear()
            if self._ended is not None:
                self._wakeup.set()
            return events
        assert self._ended is not None
        raise self._ended

    def put(self, event: RequestEvent) -> bool:
        """Queues an event for the reader. Returns False if too many are waiting. Drops events after the end, so that no
        gap is visible."""
        if self._ended is not None:
            return True
        if len(self._events) >= EVENT_LIMIT:
            return False
        self._events.append(event)
        self._wakeup.set()
        return True

    def end(self, ended: Ended) -> None:
        self._ended = self._ended or ended
        self._wakeup.set()


class RequestRegistry:
    """Registry of requests: accepts them, passes the engine's events to them, and reports the node's state."""

    def __init__(
        self, config: NodeConfig, limits: Limits, backstop: float = BACKSTOP, gpu: GpuWatch | None = None
    ) -> None:
        self._config = config
        self._gpu = gpu or GpuWatch(None)
        self.limits = limits
        self._run_dir = Path(config.run_dir)
        self.backstop = backstop
        self._epoch = secrets.token_hex(8)
        self._seq = 0
        self._in_flight: dict[str, InFlight] = {}
        self._queue_shares = QueueShares()
        self._received = Received()
        self._log = ResidencyLog()
        self._stats = NO_STATS
        self._error = "the engine is starting"
        self._hang = ""
        """error text for a connected engine whose heartbeat has stopped; else empty"""
        self._link: EngineLink | None = None
        self._questions = Questions()
        self.ready: Ready | None = None
        self.draining = False
        """whether new requests are refused while running ones continue"""
        self.url = ""

    def attach(self, link: EngineLink) -> None:
        self._link = link

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> InFlight:
        """Sends a request to the engine. Raises ServiceError if it can't be accepted."""
        self._received = self._received.with_one(request.place)
        self._check(request)
        self._send(Submit(request))
        entry = InFlight(request)
        late = request.timeout + self.backstop
        entry.timer = asyncio.get_running_loop().call_later(late, self._expire, entry, late)
        self._in_flight[request.id] = entry
        self._queue_shares.join(request.tenant, request.weight)
        return entry

    def cancel(self, entry: InFlight) -> None:
        """Cancels the request in the engine. It counts as in flight until the engine has finished it."""
        if self._in_flight.get(entry.id) is entry and self.ready is not None:
            try:
                self._send(Cancel(entry.id))
            except ServiceError as error:
                # the link is closing: engine_gone frees the place
                log.warning(
                    "a cancellation could not be sent to the engine",
                    extra={"request": entry.id, "reason": error.message},
                )

    async def ask(self, question: Question, seconds: float) -> Answer | None:
        """Asks the engine a question. Returns its answer; None if it does not answer within `seconds`. Raises
        ServiceError."""
        return await self._questions.ask(self._send, question, seconds)

    def want(self, residency: WantedResidency) -> None:
        """Passes prefetch hints to the engine. Raises ServiceError."""
        self._send(PrefetchHints(residency))

    def _check(self, request: GenerateRequest) -> None:
        if self.state == "draining":
            why = f": {fault}" if (fault := self._gpu.fault) else ""
            raise ServiceError("unavailable", f"this node is draining{why}", retry_after=RETRY_AFTER)
        if self.ready is None or self._hang:
            raise ServiceError("unavailable", f"this node is not ready: {self.error}", retry_after=RETRY_AFTER)
        if request.base != self.ready.base:
            raise ServiceError("unavailable", "this node serves another base model", retry_after=RETRY_AFTER)
        check_request(request, self.limits, self.ready.max_context)
        if request.id in self._in_flight:
            raise ServiceError("conflict", f"request {request.id} is already in flight")
        if self._full_for(request):
            raise ServiceError("overloaded", f"{self.queued} requests are already waiting", retry_after=RETRY_AFTER)

    def _full_for(self, request: GenerateRequest) -> bool:
        """Returns whether the request must be refused because the queue is full. The engine decides which request
        leaves a full queue, so requests that may displace another are still sent to it."""
        limit = self._config.engine.queue_limit
        if self.queued < limit:
            return False
        if self.queued >= limit + room_for_others(limit):
            return True
        if request.slo_class == "strict" and any(entry.slo_class == "best_effort" for entry in self._waiting()):
            return False
        return not self._queue_shares.tenant_to_displace(request.tenant, request.weight)

    def _waiting(self) -> Iterator[InFlight]:
        return (entry for entry in self._in_flight.values() if not entry.admitted)

    def _send(self, command: Command) -> None:
        if self._link is None:
            raise ServiceError("unavailable", "this node has no engine", retry_after=RETRY_AFTER)
        try:
            self._link.send(command)
        except LinkDown as error:
            raise ServiceError("unavailable", f"this node is not ready: {error}", retry_after=RETRY_AFTER) from error

    def _expire(self, entry: InFlight, late: float) -> None:
        self.cancel(entry)
        self._remove(entry)
        log.error("engine did not end a request", extra={"request": entry.id, "seconds": late})
        entry.end(Ended("timeout", "the engine did not keep the request's deadline"))

    def _remove(self, entry: InFlight) -> None:
        if self._in_flight.get(entry.id) is entry:
            del self._in_flight[entry.id]
            if not entry.admitted:
                self._queue_shares.leave(entry.tenant)
        if entry.timer is not None:
            entry.timer.cancel()

    # -- events of the engine (EngineListener) --------------------------------------------------------------------

    def engine_ready(self, ready: Ready) -> None:
        self.ready = ready
        self._error = self._hang = ""
        clear_exit(self._run_dir)

    def engine_events(self, events: list[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, Stats):
                self._take_stats(event)
            elif isinstance(event, Admitted | PromptScored | Generated | Finished):
                self._deliver(event)
            elif isinstance(event, Answer):
                self._questions.answered(event)
            elif isinstance(event, Ready):
                self.ready = event

    def engine_gone(self, reason: str) -> None:
        self.ready, self._stats, self._error, self._hang = None, NO_STATS, reason, ""
        self._fail_all()

    def engine_silent(self, seconds: float) -> None:
        """Records by how many seconds the engine's heartbeat is overdue; 0 if it is not. From SILENT_S on, the engine
        counts as stalled. From FAILED_S on, all requests in flight fail; they are also cancelled, in case the engine
        recovers."""
        if self.ready is None:
            return
        hang = f"the engine has not responded for {seconds:.0f} s" if seconds >= SILENT_S else ""
        if bool(hang) != bool(self._hang):
            log.warning("engine hangs" if hang else "engine responds again")
        self._hang = hang
        if seconds >= FAILED_S:
            for entry in self._in_flight.values():
                self.cancel(entry)
            self._fail_all()

    def _fail_all(self) -> None:
        for entry in list(self._in_flight.values()):
            self._remove(entry)
            entry.end(Ended("node_failed", "the node's engine ended while it served the request"))
        self._questions.engine_gone()

    def _take_stats(self, stats: Stats) -> None:
        self._stats = stats
        for entry in self._in_flight.values():
            entry.pictured = entry.admitted  # a snapshot includes all earlier admissions

    def _deliver(self, event: RequestEvent) -> None:
        entry = self._in_flight.get(event.id)
        if entry is None:
            return  # it was given up after its deadline
        if isinstance(event, Admitted):
            entry.admitted = True
            self._queue_shares.leave(entry.tenant)
        if not entry.put(event):
            self.cancel(entry)
            entry.end(Ended("cancelled", f"the reader was slower than {EVENT_LIMIT} events"))
        if isinstance(event, Finished):
            self._remove(entry)

    # -- reports --------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return sum(1 for _ in self._waiting())

    @property
    def error(self) -> str:
        """Reason why the node can't be used; empty if it can."""
        if fault := self._gpu.fault:
            return fault
        return self._hang if self.ready is not None else read_exit(self._run_dir) or self._error

    @property
    def state(self) -> str:
        if self.draining or self._gpu.fault:
            return "draining"
        return "ready" if self.ready is not None and not self._hang else "warming"

    def record(self) -> NodeRecord:
        """Returns the node's current record. Each has a higher `seq`."""
        self._seq += 1
        ready, stats, queued = self.ready, self._stats, self.queued
        on_gpu = ready is not None and ready.device.startswith("cuda")  # otherwise no link was measured
        measured = stats.performance.to_device.bandwidth if on_gpu and stats.performance is not None else None
        gpu = self._gpu.poll(measured)
        waiting = [entry for entry in self._in_flight.values() if not entry.pictured]
        return NodeRecord(
            id=self._config.node_id,
            epoch=self._epoch,
            seq=self._seq,
            url=self.url,
            state=self.state,
            base_id=self._config.engine.base_id,
            engine=self._config.engine.engine,
            running=len(self._in_flight) - queued,
            queued=queued,
            queue_limit=self._config.engine.queue_limit,
            contexts=sum(stats.batch_contexts),
            **rank_sums(
                stats.running_ranks(),
                [entry.rank for entry in waiting],
                stats.performance.decode.padded_rank if stats.performance is not None else 0,
            ),
            prompt_tokens_left=sum(entry.prompt_tokens for entry in waiting) + stats.prompt_tokens_left,
            strict=self._strict_room(waiting),
            received=self._received,
            error=self.error,
            pool=self._config.pool,
            gpu=gpu.facts if gpu is not None else None,
            gpu_load=gpu.load if gpu is not None else None,
            best_effort=sum(entry.slo_class == "best_effort" for entry in self._in_flight.values()),
            **{name: getattr(stats, name) for name in OF_STATS},
            **self._facts_of_engine(),
        )

    def _facts_of_engine(self) -> dict[str, Any]:
        """Returns the fields of a record that are copied from Ready; defaults without an engine."""
        if self.ready is None:
            return {"base": "", "max_context": 0, "kv_blocks": 0, "block_tokens": self._config.engine.block_tokens}
        return {name: getattr(self.ready, name) for name in OF_READY}

    def _strict_room(self, waiting: list[InFlight]) -> StrictRoom | None:
        """Returns the room for strict requests, with the prompt tokens of the strict requests in `waiting` added. These
        requests are not in the engine's last snapshot. Returns None until the engine has reported any room."""
        room = self._stats.strict
        if room is None:
            return None
        prompts = room.prompt_tokens + sum(entry.prompt_tokens for entry in waiting if entry.slo_class == "strict")
        queued = sum(entry.slo_class == "strict" for entry in self._waiting())
        return msgspec.structs.replace(room, queued=queued, prompt_tokens=prompts)

    def news(self, acknowledged: int) -> NodeReport:
        """Returns the report for a gateway that has acknowledged changes up to number `acknowledged`; FULL_REPORT: a
        full report."""
        return self._log.news(self.record(), self._stats.residents, acknowledged)

    def all_news(self) -> NodeReport:
        """Returns a full report on this node, for a reader without earlier state."""
        return full_report(self.record(), self._stats.residents, self._log.at)
