"""An engine on a GPU, many adapters in pinned host memory, and the calls that cold_starts.py times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import numpy as np
import torch

from cluster.messages import Adapter, Sampling
from node_agent.adapter_memory.link import Link
from node_agent.coldstart import cold_starts
from node_agent.coldstart.auto_workers import TYPICAL
from node_agent.coldstart.calibration import Calibration
from node_agent.coldstart.cold_starts import ColdStartMode
from node_agent.coldstart.handoff_link import HandoffLink
from node_agent.coldstart.pass_times import CallKind
from node_agent.coldstart.planner import PLANS
from node_agent.coldstart.profile import LinkCost
from node_agent.coldstart.stream import StreamPool
from node_agent.config import LinkConfig
from node_agent.cores import usable_cores
from node_agent.types import Plan
from tests.support.local_engine import LocalEngine
from tests.support.random_model import random_weights, write_adapters, write_base

WAYS = {
    "cached": cold_starts.MODES["wait"],
    "ondmd": ColdStartMode(("wait",), blocks=True),
    "overlap": ColdStartMode(("wait",)),
    "pipeline": ColdStartMode(("pipeline",)),
    "assist": ColdStartMode(("assist",), whole_adapter=True),
    "full": cold_starts.MODES["auto"],
    "assist_pipeline": ColdStartMode(("assist",)),
}
"""`ondmd`: load, then prefill, as S-LoRA does it; nothing else runs meanwhile."""
MAX_COLD = 4
MAX_WORKERS = 14
SLOW_RATE = 1e9


@dataclass
class Bench:
    engine: LocalEngine
    adapters: dict[int, list[Adapter]]
    rng: np.random.Generator
    measured: LinkCost = field(init=False)
    handoff: LinkCost | None = field(init=False)

    def __post_init__(self) -> None:
        profile = self.engine.engine.cold_start.profile
        assert profile is not None
        self.measured, self.handoff = profile.link, profile.handoff
        self.engine.idle = 0.01

    @property
    def pool(self) -> StreamPool | None:
        assist = self.engine.engine.assist
        return assist.workers if assist is not None and isinstance(assist.workers, StreamPool) else None

    def set_rate(self, rate: float | None) -> None:
        """Sets the bytes per second of all loads and handoffs together; None: what the link gives."""
        engine, starts = self.engine.engine, self.engine.engine.cold_start
        link = Link(None if rate is None else LinkConfig(rate), "device")
        engine.store.loader.device_link = link
        if starts.workers is not None:
            starts.workers.link = None if rate is None else HandoffLink(link, engine.store.loader.add_crossed)
        assert starts.profile is not None
        handoff = None if self.handoff is None else _held_to(self.handoff, rate)
        profile = msgspec.structs.replace(starts.profile, link=_held_to(self.measured, rate), handoff=handoff)
        starts.use(profile, starts.workers)

    def measure_kind(self, rank: int, tokens: int) -> None:
        """Measures calls of this rank and length at the rate that is set, as an idle node does: only then does the
        planner ask workers for such a call."""
        starts, kind = self.engine.engine.cold_start, CallKind(TYPICAL.projections, rank, tokens)
        if starts.workers is not None and not starts.times.is_measured(kind):
            Calibration(self.engine.engine, self.engine.base).measure(kind, PLANS)

    def settle(self) -> None:
        """Waits until all loads have ended, which may be after the first token. Raises TimeoutError."""
        deadline = time.monotonic() + 60.0
        while self.engine.engine.store.loads_in_flight:
            self.engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError("a load does not end")

    def forget(self) -> None:
        """Take every adapter off the device; all stay in host memory."""
        self.settle()
        store = self.engine.engine.store
        for digest in list(store.device):
            if not store.discard(digest):
                raise RuntimeError(f"adapter {digest} is in use between two runs")

    def prompts(self, tokens: int, count: int) -> list[list[int]]:
        drawn: list[list[int]] = self.rng.integers(3, self.engine.base.vocab_size, (count, tokens)).tolist()
        return drawn

    def serve(
        self, mode: ColdStartMode, adapters: Sequence[Adapter], prompts: Sequence[list[int]], count: int = 1
    ) -> list[tuple[float, list[int], list[Any], Any]]:
        """All at once: (seconds to the first token, tokens, their log probabilities, cold start) of each."""
        engine = self.engine
        engine.engine.cold_start.mode = mode
        begin = time.perf_counter()
        how = Sampling(temperature=0.0, logprobs=0 if count > 1 else None)
        calls = [
            engine.submit(prompt, count, adapter, how, ignore_eos=True)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]
        engine.run(limit=60.0)
        results = []
        for call in calls:
            outcome = engine.outcomes.pop(call)
            if outcome.finished is None or outcome.finished.reason != "length":
                raise RuntimeError(f"a call ended with {outcome.finished}")
            results.append((outcome.times[0] - begin, outcome.tokens, outcome.logprobs, outcome.finished.cold_start))
        return results

    def ttft(self, name: str, adapters: Sequence[Adapter], prompts: Sequence[list[int]]) -> float:
        if name != "cached":
            self.forget()
        seconds = mean(one[0] for one in self.serve(WAYS[name], adapters, prompts))
        self.settle()
        return seconds


def _held_to(cost: LinkCost, rate: float | None) -> LinkCost:
    """Returns the cost of a link that carries no more than `rate` bytes per second."""
    return cost if rate is None else LinkCost(cost.latency, min(rate, cost.bandwidth))


def build(root: Path, shape: str, device: str, ranks: dict[int, int], seed: int, runner: str = "auto") -> Bench:
    """A base of this shape and `ranks[rank]` adapters of each rank, all in host memory."""
    base = write_base(root / shape, shape, seed)
    paths = {rank: write_adapters(root / "adapters", shape, rank, count, seed) for rank, count in ranks.items()}
    sizes = [(path / "adapter_model.safetensors").stat().st_size for group in paths.values() for path in group]
    size = sum(sizes) + max(sizes)  # room for a measured adapter, which then takes no other's
    size += size // 4 + (64 << 20)  # pages that are not full
    workers = max(1, min(MAX_WORKERS, usable_cores() - 2))
    engine = LocalEngine(
        base, root / "registry", random_weights(runner, seed, torch.device(device)), runner=runner, device=device,
        dtype="bfloat16", threads=1, cpu_workers=workers, adapter_memory=size, host_memory=size,
        chunk_tokens=2048, max_rows=32, max_cold=MAX_COLD, kv_memory=(32 << 30) if device == "cuda" else (64 << 20),
    )  # fmt: skip
    adapters = {rank: [engine.deploy(path) for path in group] for rank, group in paths.items()}
    bench = Bench(engine, adapters, np.random.default_rng(seed))
    for group in adapters.values():
        for adapter in group:  # through host memory to the device
            bench.serve(WAYS["overlap"], [adapter], bench.prompts(4, 1))
    return bench


@contextmanager
def all_handed_over(bench: Bench) -> Iterator[None]:
    """Every layer of a cold prompt is for the CPU workers, and its load takes longer than that."""
    starts, layers = bench.engine.engine.cold_start, bench.engine.base.num_layers
    usual, full_plan = starts.plan, Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    starts.plan = lambda *_: full_plan  # type: ignore[method-assign]
    bench.set_rate(SLOW_RATE)
    try:
        yield
    finally:
        starts.plan = usual  # type: ignore[method-assign]
        bench.set_rate(None)
