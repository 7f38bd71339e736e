"""Engines that serve the same calls with adapters that are there, or have to be loaded: what coldstart.py compares."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.latency import Sample
from benchmarks.local_engine import LocalEngine
from benchmarks.peft_reference import make_adapter
from benchmarks.workloads import Call
from cluster.messages import Adapter, ColdStart
from node_agent.coldstart.cold_starts import WAYS, Way

TARGETS = ["q_proj", "k_proj", "v_proj"]
VARIANTS: dict[str, Way] = {
    "cached": Way(("wait",)),
    "ondmd": Way(("wait",), blocks=True),
    "overlap": Way(("wait",)),
    "pipeline": Way(("pipeline",)),
    "assist": Way(("assist",), whole=True),
    "full": WAYS["auto"],
}
"""S-LoRA's load-then-prefill, and what is added to it one at a time. `cached` has every adapter on the device."""


@dataclass(frozen=True)
class Served:
    """One call as a client saw it, and what the engine says of its cold start."""

    sample: Sample
    cold: ColdStart


def make_adapters(model_dir: Path, root: Path, ranks: Sequence[int], seed: int) -> list[Path]:
    """Adapters of these ranks on q, k and v; one set of weights per rank, under a scaling of its own for each."""
    made: dict[int, Path] = {}
    found = []
    for i, rank in enumerate(ranks):
        if rank not in made:
            config: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": TARGETS}
            made[rank] = make_adapter(model_dir, root / f"rank{rank}", seed + rank, **config)
        copy = root / f"a{i}"
        shutil.copytree(made[rank], copy, copy_function=_link)
        config = json.loads((made[rank] / "adapter_config.json").read_text())
        (copy / "adapter_config.json").unlink()
        (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": rank + i / 1000}))
        found.append(copy)
    return found


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


class Rig:
    """One engine, and the adapters it serves, all in host memory."""

    def __init__(self, engine: LocalEngine, adapters: list[Adapter]) -> None:
        self.engine, self.adapters = engine, adapters
        self._fill_host()

    def serve(self, calls: Sequence[Call], prompts: Sequence[list[int]], gap: float) -> list[Served]:
        """The calls at their times (`gap`: seconds between two on average), until all have ended."""
        begin = time.perf_counter()
        due = [begin + call.at * gap for call in calls]
        sent: dict[str, Sample] = {}
        while len(sent) < len(calls) or self.engine.engine.busy:
            while len(sent) < len(calls) and due[len(sent)] <= time.perf_counter():
                i = len(sent)
                request = self.engine.submit(
                    prompts[i], calls[i].output_tokens, self.adapters[calls[i].adapter], ignore_eos=True
                )
                sent[request] = Sample("", due=due[i], sent=due[i], prompt_tokens=len(prompts[i]))
            if self.engine.engine.busy:
                self.engine.step()
            else:
                time.sleep(max(0.0, due[len(sent)] - time.perf_counter()))
        return [self._served(request, sample) for request, sample in sent.items()]

    def forget_device(self) -> None:
        """Take every adapter off the device; all stay in host memory."""
        for digest in list(self.engine.engine.store.device):
            if not self.engine.engine.store.discard(digest):
                raise RuntimeError(f"adapter {digest} is in use between two runs")

    def fill_device(self) -> None:
        """Bring every adapter to the device, which must have room for all."""
        for adapter in self.adapters:
            self.engine.submit([1, 2], 1, adapter, ignore_eos=True)
            self.engine.run()

    def _fill_host(self) -> None:
        store = self.engine.engine.store
        for adapter in self.adapters:
            store.announce(adapter)
            deadline = time.monotonic() + 60
            while store.announce(adapter) == "absent":
                store.retract(adapter.digest)
                store.poll()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"adapter {adapter.digest} does not reach host memory")
                time.sleep(0.001)
            store.retract(adapter.digest)
            store.retract(adapter.digest)

    def _served(self, request: str, sample: Sample) -> Served:
        outcome = self.engine.outcomes.pop(request)
        assert outcome.finished is not None
        if outcome.finished.reason != "length":
            raise RuntimeError(f"a call ended with {outcome.finished}")
        sample.times, sample.end, sample.output_tokens = outcome.times, outcome.times[-1], len(outcome.tokens)
        return Served(sample, outcome.finished.cold_start)


def capacity(rig: Rig, calls: Sequence[Call], prompts: Sequence[list[int]]) -> float:
    """Calls per second when all are there at once."""
    begin = time.perf_counter()
    rig.serve([Call(0.0, c.adapter, c.prompt_tokens, c.output_tokens) for c in calls], prompts, 0.0)
    return len(calls) / (time.perf_counter() - begin)


def warm_prefill(rig: Rig, tokens: int, rounds: int = 5) -> float:
    """Seconds to the first token of a prompt of so many tokens, alone, its adapter on the device."""
    prompt = np.random.default_rng(tokens).integers(100, min(1000, rig.engine.base.vocab_size), tokens).tolist()
    found = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        request = rig.engine.submit(prompt, 1, rig.adapters[0], ignore_eos=True)
        rig.engine.run()
        found.append(rig.engine.outcomes.pop(request).times[0] - begin)
    return median(found[1:])
