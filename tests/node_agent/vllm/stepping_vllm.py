"""A played vLLM whose steps take known times, by a clock of its own, under the node's real engine for vLLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from adapters.open_store import open_store
from cluster.performance_model import DecodeModel, PrefillModel, counted_rank
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.eviction import POLICIES
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.limits import Limits
from node_agent.vllm.driver import Driver
from node_agent.vllm.engine import VllmEngine
from node_agent.vllm.figures import Figures
from node_agent.vllm.folder import WEIGHTS
from node_agent.vllm.folders import FolderTier
from node_agent.vllm.slots import AdapterOrders, Slot, SlotLimits, SlotStore

SECONDS, STEP_S = 60.0, 0.002
MAX_RANK, BLOCK_TOKENS = 64, 16
DECODE = DecodeModel(0.02, 2e-3, 1e-5, 3e-5, "request_ranks", padded_rank=MAX_RANK)
PREFILL = PrefillModel(0.01, 1e-3, 1e-7, 1e-6, padded_rank=MAX_RANK)


@dataclass(eq=False)
class _Computed:
    """A request in the played vLLM."""

    prompt: int
    rank: int
    adapter: int
    left: int
    outputs: asyncio.Queue[Any]
    scheduled: float = 0.0
    context: int = 0


@dataclass
class SteppingVllm:
    """vLLM's AsyncLLM, as far as a node uses it. All waiting prompts are computed in one pass."""

    slots: int
    decode: DecodeModel = DECODE
    prefill: PrefillModel = PREFILL
    now: float = 1000.0
    running: list[_Computed] = field(default_factory=list)
    waiting: list[_Computed] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    """ranks of the adapters in slots, by their numbers"""
    ended: list[str] = field(default_factory=list)
    steps: int = 0
    still: threading.Event = field(default_factory=threading.Event)
    """no step ends while this is set"""
    are_read: Callable[[], bool] = lambda: True
    """whether the node has read all tokens: a step waits for that, since this host may be busy"""
    vllm_config: Any = None

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        number = 0 if lora_request is None else lora_request.number
        assert number == 0 or number in self.ranks, "its adapter has no slot"
        ids = prompt["ids"]
        request = _Computed(len(ids), self.ranks.get(number, 0), number, sampling_params["max_tokens"], asyncio.Queue())
        self.waiting.append(request)
        try:
            while True:
                output = await request.outputs.get()
                yield output
                if output.finished:
                    return
        finally:
            self.ended.append(request_id)
            for requests in (self.waiting, self.running):
                if request in requests:
                    requests.remove(request)

    def _tick(self) -> None:
        """Computes step after step."""
        if self.are_read() and (self.running or self.waiting) and not self.still.is_set():
            self._step()
        self.timer = asyncio.get_running_loop().call_later(STEP_S, self._tick)

    def _step(self) -> None:
        self.steps += 1
        prompts, self.waiting = self.waiting, []
        seconds = 0.0
        if prompts:
            for request in prompts:
                request.scheduled = self.now
            seconds += self.prefill.seconds(
                sum(request.prompt for request in prompts),
                sum(request.prompt**2 for request in prompts),
                sum(request.prompt * counted_rank(request.rank, self.prefill.padded_rank) for request in prompts),
            )
        if self.running:
            ranks = [counted_rank(request.rank, self.decode.padded_rank) for request in self.running]
            contexts = sum(request.context for request in self.running)
            seconds += self.decode.seconds(len(self.running), contexts, sum(ranks))
        self.now += seconds
        for request in [*self.running, *prompts]:
            request.context = request.context + 1 if request.context else request.prompt
            request.left -= 1
            metrics = SimpleNamespace(scheduled_ts=request.scheduled, last_token_ts=self.now)
            only = SimpleNamespace(token_ids=[7], logprobs=None)
            request.outputs.put_nowait(
                SimpleNamespace(
                    outputs=[only],
                    prompt_logprobs=None,
                    num_cached_tokens=0,
                    finished=request.left == 0,
                    metrics=metrics,
                )
            )
        self.running = [request for request in [*self.running, *prompts] if request.left]

    async def abort(self, request_id: str) -> None:
        await asyncio.sleep(0)

    async def add_lora(self, lora_request: Any) -> bool:
        assert len(self.ranks) < self.slots, "more adapters than slots"
        assert (lora_request.folder / WEIGHTS).exists()
        self.ranks[lora_request.number] = lora_request.rank
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        assert all(request.adapter != lora_id for request in [*self.running, *self.waiting]), "it is in use"
        return self.ranks.pop(lora_id, None) is not None

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any:
        return [{"slots": sorted(self.ranks), "host": sorted(self.ranks)}]

    def shutdown(self) -> None:
        self.timer.cancel()

    def start(self) -> SteppingVllm:
        self._tick()
        return self


class PlayedTypes:
    """Constructors of what the played vLLM takes."""

    def parameters(self, arguments: dict[str, Any], bad_words: Any) -> Any:
        return arguments

    def adapter(self, digest: str, number: int, folder: Path) -> Any:
        name = folder.name.removeprefix("dummy-")
        rank = int(name) if folder.name.startswith("dummy-") else 8
        return SimpleNamespace(digest=digest, number=number, folder=folder, rank=rank)

    def prompt(self, token_ids: Any, salt: str) -> Any:
        return {"ids": list(token_ids), "salt": salt}


class SteppingWorld:
    """The node's engine over a played vLLM."""

    def __init__(self, root: Path, slots: int = 4, max_rows: int = 16, **times: Any) -> None:
        self.vllm = SteppingVllm(slots, **times)
        self.changed = threading.Event()
        self.objects = open_store(str(root / "registry"))
        self.driver = Driver(self.vllm_start, self.changed.set)
        self.driver.wait(SECONDS)
        self.vllm.are_read = lambda: not self.driver._outputs
        demand, policy = Demand(), POLICIES["lru"]
        types = PlayedTypes()
        tier = FolderTier(self.objects, 1 << 24, policy(demand), self.changed.set)

        def add(slot: Slot) -> None:
            self.driver.add_adapter(slot.number, types.adapter(slot.adapter.digest, slot.number, slot.folder.path))

        orders = AdapterOrders(add, lambda slot: self.driver.remove_adapter(slot.number))
        store = SlotStore(tier, SlotLimits(slots, MAX_RANK, 1000), orders, demand, policy(demand))
        limits = Limits(
            max_context=512, vocab_size=256, max_rows=max_rows, max_cold=1, chunk_tokens=512, queue_limit=64,
            prefix_cache=False, prefetch_waste=None,
        )  # fmt: skip
        self.engine = VllmEngine(
            limits,
            store,
            BlockPool(1024, BLOCK_TOKENS),
            frozenset(),
            self.driver,
            types,
            Figures(bytes),
            answer_s=SECONDS,
        )

    def vllm_start(self) -> Any:
        return self.vllm.start()

    def close(self) -> None:
        self.engine.close()

    def run(self) -> None:
        """Iterates until all requests have ended."""
        while self.engine.busy:
            self.changed.wait(0.01)
            self.changed.clear()
            self.engine.prepare()
