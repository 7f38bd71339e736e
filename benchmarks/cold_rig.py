"""An engine on one core, the adapters that it serves, and how a stretch of calls went: what coldstart.py drives."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.latency import Sample
from benchmarks.workloads import Call
from cluster.messages import Adapter, ColdStart
from node_agent.types import Lease
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import make_adapter, redraw_adapter

TARGETS = ["q_proj", "k_proj", "v_proj"]
LOAD_LIMIT_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Served:
    """One call as a client saw it, and what the engine says of its cold start."""

    sample: Sample
    cold: ColdStart
    prefill: float = 0.0
    """seconds from its admission to its first token; 0: not known"""


@dataclass
class Run:
    """A stretch of calls. Seconds."""

    served: list[Served] = field(default_factory=list)
    wall: float = 0.0
    """idle time that was skipped included"""
    device: float = 0.0
    """in which the engine computed, its waits for workers included"""
    workers: float = 0.0
    """of the CPU workers' cores, polling included"""
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end) of every time in which requests ran and nothing was computed"""


def make_adapters(
    model_dir: Path,
    root: Path,
    ranks: Sequence[int],
    seed: int,
    targets: Sequence[str] = TARGETS,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Adapters of these ranks on `targets`, each with random weights of its own."""
    first: dict[int, Path] = {}
    found = []
    for i, rank in enumerate(ranks):
        path, own_seed = root / f"a{i}", (seed << 20) + i
        if rank in first:
            redraw_adapter(first[rank], path, own_seed)
        else:
            config: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": list(targets)}
            first[rank] = make_adapter(model_dir, path, own_seed, dtype, **config)
        found.append(path)
    return found


class Rig:
    """One engine and its adapters, all in host memory."""

    def __init__(self, engine: LocalEngine, adapters: Sequence[Adapter]) -> None:
        self.engine, self.adapters = engine, list(adapters)
        self._stalled_since = 0.0
        self._fill_host()

    def serve(self, calls: Sequence[Call], prompts: Sequence[list[int]], gap: float) -> Run:
        """The calls at their times (`gap`: seconds between two on average), until all have ended.

        Time in which nothing runs is skipped: it changes no latency, and a study of a lightly loaded engine would
        consist of it.
        """
        run, sent, skipped = Run(), dict[str, Sample](), 0.0
        before, begin = self._worker_seconds(), time.perf_counter()
        while len(sent) < len(calls) or self.engine.engine.busy:
            while len(sent) < len(calls):
                i, due = len(sent), begin + calls[len(sent)].at * gap - skipped
                if due > time.perf_counter():
                    break
                request = self.engine.submit(
                    prompts[i], calls[i].output_tokens, self.adapters[calls[i].adapter], ignore_eos=True
                )
                sent[request] = Sample("", due=due, sent=due, prompt_tokens=len(prompts[i]))
            if self.engine.engine.busy:
                self._step(run)
            elif self.engine.engine.store.loads_in_flight:  # of a request that did not need all of it
                self.engine.step()
            else:
                skipped += max(0.0, due - time.perf_counter())
        run.wall = time.perf_counter() - begin + skipped
        run.workers = self._worker_seconds() - before
        run.served = [self._served(request, sample) for request, sample in sent.items()]
        return run

    def first_tokens(self, prompt: list[int], adapters: Iterable[int]) -> list[Served]:
        """The prompt with each of these adapters, all sent at once, one token each."""
        calls = [Call(0.0, adapter, len(prompt), 1) for adapter in adapters]
        return self.serve(calls, [prompt] * len(calls), 0.0).served

    def forget_device(self) -> None:
        """Take every adapter off the device; all stay in host memory."""
        store = self.engine.engine.store
        for digest in list(store.device):  # a request of one token may end before its adapter is wholly there
            self._until(lambda digest=digest: store.discard(digest), "its end")

    def fill_device(self, adapters: Iterable[int]) -> None:
        """Bring these adapters to the device, which must have room for all."""
        store = self.engine.engine.store
        for adapter in (self.adapters[i] for i in adapters):
            lease = store.acquire(adapter)
            if not isinstance(lease, Lease):
                raise RuntimeError(f"there is no room for adapter {adapter.digest}: {lease}")
            self._until(lambda lease=lease: store.loaded(lease), "the device")
            store.release(lease, [])

    def _step(self, run: Run) -> None:
        begin = time.perf_counter()
        if self.engine.step():
            run.device += time.perf_counter() - begin
            if self._stalled_since:
                run.stalls.append((self._stalled_since, begin))
            self._stalled_since = 0.0
        elif self.engine.engine.running:
            self._stalled_since = self._stalled_since or begin

    def _fill_host(self) -> None:
        store = self.engine.engine.store
        for adapter in self.adapters:
            store.announce(adapter)
            self._until(lambda adapter=adapter: self._in_host(adapter), "host memory")
            store.retract(adapter.digest)

    def _in_host(self, adapter: Adapter) -> bool:
        host = self.engine.engine.store.hosts.get(adapter.digest)
        return host is not None and host.complete

    def _until(self, condition: Any, where: str) -> None:
        deadline = time.monotonic() + LOAD_LIMIT_S
        while not condition():
            self.engine.engine.store.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"an adapter does not reach {where}")
            time.sleep(0.0005)

    def _worker_seconds(self) -> float:
        assist = self.engine.engine.assist
        return sum(_cpu_seconds(pid) for pid in assist.workers.pids()) if assist is not None else 0.0

    def _served(self, request: str, sample: Sample) -> Served:
        outcome = self.engine.outcomes.pop(request)
        assert outcome.finished is not None
        if outcome.finished.reason != "length":
            raise RuntimeError(f"a call ended with {outcome.finished}")
        sample.times, sample.end, sample.output_tokens = outcome.times, outcome.times[-1], len(outcome.tokens)
        return Served(sample, outcome.finished.cold_start, outcome.finished.prefill)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def capacity(rig: Rig, calls: Sequence[Call], prompts: Sequence[list[int]]) -> float:
    """Calls per second when all are there at once."""
    begin = time.perf_counter()
    rig.serve([Call(0.0, c.adapter, c.prompt_tokens, c.output_tokens) for c in calls], prompts, 0.0)
    return len(calls) / (time.perf_counter() - begin)


def draw_prompt(engine: LocalEngine, tokens: int, seed: int = 0) -> list[int]:
    high = min(1000, engine.base.vocab_size)
    return [int(token) for token in np.random.default_rng([seed, tokens]).integers(100, high, tokens)]


def warm_prefill(rig: Rig, tokens: int, rounds: int = 5) -> float:
    """Seconds to the first token of a prompt of so many tokens, alone, its adapter on the device."""
    prompt = draw_prompt(rig.engine, tokens)
    return median([rig.first_tokens(prompt, [0])[0].sample.ttft for _ in range(rounds + 1)][1:])
