"""Engine of a node that drives vLLM: requests wait, enter and end as in our own engine, and vLLM computes their
tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cluster.news import VllmLoad
from node_agent.device_event import Event
from node_agent.engine.base import EngineBase
from node_agent.engine.events import SCORES_PER_EVENT
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.limits import Limits
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.pulse import Pulse
from node_agent.engine.request import Request
from node_agent.ipc import PromptScored, Top
from node_agent.states import RequestState
from node_agent.vllm.driver import (
    AbortSent,
    AdapterLoaded,
    Driver,
    EngineDied,
    NewTokens,
    Output,
    RequestFailed,
    WorkerReports,
)
from node_agent.vllm.figures import Figures
from node_agent.vllm.observed import ObservedSteps
from node_agent.vllm.sampling import top_of, vllm_parameters
from node_agent.vllm.slots import SlotStore
from node_agent.vllm.watch import Watch

log = logging.getLogger("garnish.engine")


class VllmDied(RuntimeError):
    """Raised when vLLM's engine has ended, so that this process must end, too."""


class VllmTypes(Protocol):
    """Constructors of vLLM's types."""

    def parameters(self, arguments: dict[str, Any], bad_words: Sequence[Sequence[int]]) -> Any:
        """Returns SamplingParams."""

    def adapter(self, digest: str, number: int, folder: Path) -> Any:
        """Returns a LoRARequest."""

    def prompt(self, token_ids: Sequence[int], salt: str) -> Any:
        """Returns a prompt whose cached blocks are found only with the same salt."""


class VllmEngine(EngineBase):
    """Engine whose tokens vLLM computes. vLLM gets a request only when it has a row here and its adapter is in a
    slot, so that the order of the queue is ours."""

    store: SlotStore

    def __init__(
        self,
        limits: Limits,
        store: SlotStore,
        blocks: BlockPool,
        eos_ids: frozenset[int],
        driver: Driver,
        types: VllmTypes,
        figures: Figures,
        answer_s: float,
    ) -> None:
        """`answer_s`: seconds without a sign from vLLM after which it counts as dead."""
        super().__init__(limits, store, Prefixes(blocks, enabled=False), eos_ids, Pulse(compiles=False))
        self.driver, self.types, self.answer_s = driver, types, answer_s
        self._figures = figures
        self._watch = Watch(driver, store, answer_s)
        self._vllm_ids: dict[str, str] = {}
        """id in vLLM, by id of the request. Each submission of a request has another one."""
        self._requests: dict[str, Request] = {}
        """requests by their id in vLLM"""
        self._submissions = 0
        self._observed = ObservedSteps(self._requests, limits.chunk_tokens)

    def close(self) -> None:
        """Ends vLLM's processes, and frees the adapters' folders."""
        self.driver.close()
        self.store.close()

    @property
    def vllm_load(self) -> VllmLoad:
        return self._figures.load

    def library_metrics(self) -> bytes:
        return self._figures.read_text()

    def prepare(self) -> None:
        super().prepare()
        self._fail_loads()
        for request in list(self.running.values()):
            if request.id not in self._vllm_ids and self._is_loaded(request):
                self._submit(request)

    # --- what EngineBase needs

    def _poll(self) -> None:
        for output in self.driver.take():
            self.take_output(output)
        death = self._watch.poll()
        if death:
            raise VllmDied(death)
        super()._poll()

    def _problem(self, request: Request) -> tuple[str, str] | None:
        if request.sampling.grammar is not None and request.generated:
            return "unavailable", "vLLM can't continue an answer of a stated form that another node began"
        return super()._problem(request)

    def _start(self, request: Request) -> None:
        request.can_restart = request.sampling.grammar is None  # vLLM takes a form from its begin only
        if not self._is_loaded(request):
            request.change_state(RequestState.AWAITING_ADAPTER)

    def _stop(self, request: Request) -> list[Event]:
        self._book_wait(request)
        vllm_id = self._vllm_ids.pop(request.id, None)
        if vllm_id is None:
            return []
        del self._requests[vllm_id]
        sent: AbortSent = self.driver.abort(vllm_id)
        return [sent]

    # --- inside

    def _submit(self, request: Request) -> None:
        self._book_wait(request)
        if request.awaits_adapter:
            request.change_state(RequestState.RUNNING)
        self._submissions += 1
        vllm_id = f"{request.id}#{self._submissions}"
        self._vllm_ids[request.id], self._requests[vllm_id] = vllm_id, request
        arguments = vllm_parameters(request, self.eos_ids)
        adapter = None
        if request.lease is not None:
            slot = self.store.slot(request.lease)
            adapter = self.types.adapter(slot.adapter.digest, slot.number, slot.folder.path)
        self.driver.generate(
            vllm_id,
            self.types.prompt(request.tokens, request.cache_owner),
            self.types.parameters(arguments, request.sampling.bad_words),
            adapter,
        )

    def _book_wait(self, request: Request) -> None:
        """Records the load that a request has waited for, once it has ended."""
        cold, lease = request.cold, request.lease
        if cold is None or cold.load or lease is None or not self.store.loaded(lease):
            return
        slot = self.store.slot(lease)
        fetched = request.arrival_tier in ("disk", "absent")
        began = max(request.arrived, slot.folder.began if fetched else slot.began)
        cold.load = max(slot.arrived - began, 1e-6)
        cold.fetch = max(0.0, slot.folder.arrived - began) if fetched else 0.0
        cold.end_wait(time.monotonic())

    def take_output(self, output: Output) -> None:
        """Records what vLLM has done. Raises VllmDied."""
        match output:
            case AdapterLoaded(number=number, failure=failure):
                self.store.record_load(number, failure)
            case WorkerReports(workers=workers):
                self._watch.compare(workers)
            case EngineDied(reason=reason):
                raise VllmDied(reason)
            case RequestFailed(id=vllm_id, reason=reason):
                request = self._requests.get(vllm_id)
                if request is not None:
                    log.error("vLLM refused a request", extra={"request": request.id, "reason": reason})
                    self._finish(request, "error", "internal", "vLLM refused the request; the node's log says why")
            case NewTokens():
                self._take_tokens(output)

    def _take_tokens(self, output: NewTokens) -> None:
        request = self._requests.get(output.id)
        if request is None:
            return  # it ended here first
        self._observed.take(self.drift, output)
        if not request.first_token:
            request.cached_tokens = output.cached_tokens
        if output.prompt_logprobs is not None and not request.scored:
            self._score_prompt(request, output)
        for at, token in enumerate(output.token_ids):
            if self._requests.get(output.id) is not request:
                return
            top: Top | None = None
            if request.sampling.logprobs is not None and output.logprobs is not None:
                top = top_of(token, output.logprobs[at], request.sampling.logprobs)
            request.computed = len(request.tokens)
            self._take_token(request, token, top)
        if output.finished and self._requests.get(output.id) is request:
            self._finish(request, "length" if request.generated >= request.max_tokens else "stop")

    def _score_prompt(self, request: Request, output: NewTokens) -> None:
        count = request.sampling.prompt_logprobs or 0
        assert output.prompt_logprobs is not None
        tops = [
            top_of(token, entries, count)
            for token, entries in zip(request.tokens[1:], output.prompt_logprobs[1:], strict=False)
            if entries is not None
        ]
        request.scored = request.prompt_len
        self._events += [
            PromptScored(request.id, 1 + at, tops[at : at + SCORES_PER_EVENT])
            for at in range(0, len(tops), SCORES_PER_EVENT)
        ]
