"""The engine: continuous batching at iteration level, with hot and cold passes (docs/design/seams.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator

from msgspec.structs import replace

from node_agent.adapter_memory.integrity import heal
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.assist import Assist
from node_agent.coldstart.cold_lora import ColdLora
from node_agent.coldstart.cold_starts import ColdStarts
from node_agent.device import EventWatch
from node_agent.device_event import Event
from node_agent.engine.base import EngineBase
from node_agent.engine.batch import build_lora, build_step, rules_of
from node_agent.engine.cold import ColdPasses
from node_agent.engine.events import score_events, split_scores
from node_agent.engine.hot import Computed, HotPasses, OutOfMemory
from node_agent.engine.joining import Joined, Joining
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.limits import Limits
from node_agent.engine.overlap import Overlap
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.pulse import Pulse
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.scheduler import HotRows
from node_agent.ipc import Ready, Top
from node_agent.runner.lora_choice import LoraCode
from node_agent.runner.prompt_scores import all_finite
from node_agent.runner.token_masks import mask_of
from node_agent.sending_runner import batch_device
from node_agent.types import ModelRunner, Pass, PassLora, Plan, StepBatch, StepOutput

log = logging.getLogger("garnish.engine")


class Engine(EngineBase):
    """Engine that computes by a runner, in hot and cold passes. One thread calls all methods; `step` runs one
    iteration."""

    store: AdapterStore

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
        blocks = BlockPool(runner.num_blocks, runner.block_tokens)
        pulse = Pulse(compiles=runner.device.type != "cpu")
        super().__init__(limits, store, Prefixes(blocks, limits.prefix_cache), eos_ids, pulse)
        self.runner = runner
        self.start_lora, self.lora_kernel = lora.start, lora.kernel
        self._device_events = EventWatch(on_change)
        self.cold = ColdPasses(
            cold_start, self._start_cold, self._book, runner, self.pulse, self._device_events, limits.max_cold
        )
        self.joining = Joining(self.cold, runner, lambda batch, decodes: self.start_lora(batch, decodes))
        self.hot = HotPasses(runner, self._tensors, self.pulse)
        self.overlap = Overlap(self.hot, runner, self.running)

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
        if self.grammars is not None:
            self.grammars.close()
        if self.worker_manager is not None:
            self.worker_manager.close()
        if self.assist is not None:
            self.assist.workers.close()
        self.store.close()

    def step(self) -> bool:
        """Runs one iteration. Returns whether anything was computed. If not, the caller waits for a message, a load or
        a deadline."""
        self.prepare()
        used = self.compute_cold()
        return len(list(self.compute_hot(used))) > 0 or used > 0

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
        joined = self.joining.join(chosen.rows)
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

    # --- what EngineBase needs

    def ready_now(self, ready: Ready) -> Ready:
        decision = self.cold_start.decision
        return replace(
            ready,
            cpu_workers=decision.count,
            cpu_workers_reason=decision.reason,
            cpu_workers_ms={name: round(value, 2) for name, value in decision.figures},
        )

    def heal(self) -> list[str]:
        return heal(self.store)

    def _poll(self) -> None:
        super()._poll()
        if self.assist is not None:
            self.assist.poll()

    def _start(self, request: Request) -> None:
        request.rules = request.rules or rules_of(request, self.eos_ids, batch_device(self.runner))
        if request.sampling.allowed_token_ids:
            request.allowed = mask_of(request.sampling.allowed_token_ids, self.limits.vocab_size)

    def _stop(self, request: Request) -> list[Event]:
        self.cold.book_loads([request])  # include load times since the last iteration
        return [*self.cold.drop(request), *self.overlap.drop(request)]

    # --- inside an iteration

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

    # --- how requests end

    def _fail_numbers(self, request: Request) -> None:
        log.error("request %s: logits are not finite", request.id)
        self._finish(request, "error", "internal", "the model's output was not finite")
