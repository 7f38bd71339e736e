"""PEFT alone with many adapters, as its users have it: all loaded, and `set_adapter` before each call. For
coldstart.py.

There is no batch: calls are answered one after another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.cold_rig import Run, Served
from benchmarks.latency import Sample
from benchmarks.workloads import Call
from cluster.messages import ColdStart
from tests.support.peft_reference import PeftReference

WARM = ColdStart("none", "none", 0.0, 0.0)


class PeftRig:
    """Serves calls as cold_rig.Rig does. Adapters are loaded when they are first named, which nobody waits for."""

    def __init__(self, model: Path, adapters: Sequence[Path], dtype: torch.dtype) -> None:
        self._reference, self._adapters = PeftReference(model, dtype), adapters

    def serve(self, calls: Sequence[Call], prompts: Sequence[list[int]], gap: float) -> Run:
        """Time in which no call is there is skipped."""
        for call in calls:
            self._reference.model(self._adapters[call.adapter])
        run, now = Run(), 0.0
        for call, prompt in zip(calls, prompts, strict=True):
            due = call.at * gap
            now = max(now, due)
            begin = time.perf_counter()
            steps = self._reference.steps(self._adapters[call.adapter], prompt)
            times = [now + time.perf_counter() - begin for _ in zip(range(call.output_tokens), steps, strict=False)]
            run.device += times[-1] - now
            sample = Sample("", due, due, times, times[-1], len(prompt), call.output_tokens)
            run.served.append(Served(sample, WARM, times[0] - now))
            now = times[-1]
        run.wall = now
        return run

    def first_tokens(self, prompt: list[int], adapters: Sequence[int]) -> list[Served]:
        """The prompt with each of these adapters, one token each."""
        calls = [Call(0.0, adapter, len(prompt), 1) for adapter in adapters]
        return self.serve(calls, [prompt] * len(calls), 0.0).served
