"""Batches in this process, by the engine and by transformers + PEFT: engine.py and serve/serve.py compare them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from cluster.messages import Adapter
from tests.support.local_engine import LocalEngine, Outcome

RANKS = (8, 16, 32, 64, 128, 8, 16, 32)
TARGETS = ["q_proj", "k_proj", "v_proj"]


@dataclass(frozen=True)
class Workload:
    """`adapters` names one adapter (or None) per request; all requests are sent at once."""

    name: str
    adapters: tuple[int | None, ...]


@dataclass(frozen=True)
class Measured:
    ttft: float
    """seconds, median over the requests"""
    tokens_per_second: float
    step: float | None = None
    """seconds, median of the steps in which the whole batch decoded; None when there was none, or it was not seen"""


class PeftGenerate:
    """transformers + PEFT in process: a static batch, adapters mixed through `adapter_names`."""

    def __init__(self, model_dir: Path, adapters: list[Path], dtype: torch.dtype) -> None:
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        self.base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        self.model = PeftModel.from_pretrained(base, adapters[0], adapter_name="a0", autocast_adapter_dtype=False)
        for i, path in enumerate(adapters[1:], start=1):
            self.model.load_adapter(path, adapter_name=f"a{i}", autocast_adapter_dtype=False)
        self.model.eval()

    def run(self, workload: Workload, prompts: list[list[int]], count: int) -> Measured:
        clock = TokenClock()
        ids = torch.tensor(prompts)
        options: dict[str, Any] = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": count,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
            "stopping_criteria": StoppingCriteriaList([clock]),
        }
        model: Any = self.base
        if workload.adapters[0] is not None:
            model = self.model
            if len(workload.adapters) > 1:
                options["adapter_names"] = [f"a{i}" for i in workload.adapters]
            else:
                self.model.set_adapter(f"a{workload.adapters[0]}")
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(input_ids=ids, **options)
        total = time.perf_counter() - begin
        if tuple(out.shape) != (len(prompts), len(prompts[0]) + count):
            raise RuntimeError(f"generate gave {tuple(out.shape)}")
        return Measured(clock.times[0] - begin, len(prompts) * count / total, _middle(clock.times))


class TokenClock(StoppingCriteria):  # type: ignore[misc]  # transformers is not typed
    """Notes when each token was there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run_engine(
    engine: LocalEngine, adapters: Sequence[Adapter], workload: Workload, prompts: list[list[int]], count: int
) -> Measured:
    begin = time.perf_counter()
    requests = [
        engine.submit(prompt, count, None if i is None else adapters[i], ignore_eos=True)
        for prompt, i in zip(prompts, workload.adapters, strict=True)
    ]
    engine.run()
    total = time.perf_counter() - begin
    outcomes = [engine.outcomes.pop(request) for request in requests]
    if any(len(outcome.tokens) != count for outcome in outcomes):
        raise RuntimeError("a request did not get all its tokens")
    ttft = median(outcome.times[0] for outcome in outcomes) - begin
    return Measured(ttft, len(prompts) * count / total, _middle(shared_steps(outcomes)))


def shared_steps(outcomes: list[Outcome]) -> list[float]:
    """Ends of the steps from the last request's first token to the first request's last one.

    All requests that one step advances get their tokens at the same time.
    """
    first, last = max(outcome.times[0] for outcome in outcomes), min(outcome.times[-1] for outcome in outcomes)
    return [at for at in outcomes[0].times if first <= at <= last]


def _middle(times: list[float]) -> float | None:
    gaps = [after - before for before, after in pairwise(times)]
    return median(gaps) if gaps else None
