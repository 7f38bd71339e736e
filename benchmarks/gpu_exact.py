"""A base of any shape with adapters, against the same base with the adapter merged into its weights.

Both have the same drawn weights, which make close calls, so tokens may differ by rounding. What counts is how far below
the reference's best score a chosen token lies, in standard deviations of that step's scores. As a control, the same
distance for tokens that were chosen without the adapter: it shows that the comparison would notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.gpu_engine import EngineBox
from benchmarks.local_engine import LocalEngine
from benchmarks.random_model import random_loader, write_adapters
from cluster.messages import Adapter
from node_agent.device import DTYPES

RANK = 16
LENGTHS = (40, 200, 600)
"""Prompt tokens; several chunks where `chunk_tokens` is less."""
ANSWER = 12
TOLERANCE = 0.15
"""Standard deviations of a step's scores: bf16 has eight bits, and a sum over layers loses two or three."""


def merged(box: EngineBox, until: float) -> Iterator[dict[str, Any]]:
    """Greedy answers with and without an adapter, alone and in one batch."""
    del until  # two passes of the reference for each answer
    engine = box.get()
    (path,) = write_adapters(box.root / "merged", box.shape, RANK, 1, box.seed)
    adapter = engine.deploy(path)
    rng, longest = np.random.default_rng(box.seed), engine.engine.limits.max_context - ANSWER
    prompts = [rng.integers(3, engine.base.vocab_size, min(length, longest)).tolist() for length in LENGTHS]
    answers = _answers(engine, prompts, (None, adapter))
    reference: Any = random_loader(box.seed, "sdpa")(engine.model_dir, box.device, DTYPES[box.dtype])
    found = {"base": [_below(reference, *answers[None, i]) for i in range(len(prompts))]}
    merge(reference, path)
    found["adapter"] = [_below(reference, *answers[adapter.digest, i]) for i in range(len(prompts))]
    found["control"] = [_below(reference, *answers[None, i]) for i in range(len(prompts))]
    worst = {name: max(each) for name, each in found.items()}
    row: dict[str, Any] = {f"{name}_below": value for name, value in worst.items()}
    wrong = [f"{name}: {worst[name]:.3f} below the best" for name in ("base", "adapter") if worst[name] > TOLERANCE]
    if worst["control"] <= TOLERANCE:
        wrong.append(f"the adapter changes too little ({worst['control']:.3f}) for the comparison to mean anything")
    yield row | ({"wrong": "; ".join(wrong)} if wrong else {})


def _answers(
    engine: LocalEngine, prompts: list[list[int]], adapters: tuple[Adapter | None, ...]
) -> dict[tuple[str | None, int], tuple[list[int], list[int]]]:
    """(prompt, answer) by adapter's digest and prompt's place; all run together, long and short."""
    calls = {
        (None if adapter is None else adapter.digest, i): engine.submit(prompt, ANSWER, adapter, ignore_eos=True)
        for (i, prompt), adapter in product(enumerate(prompts), adapters)
    }
    engine.run()
    return {key: (prompts[key[1]], engine.outcomes.pop(call).tokens) for key, call in calls.items()}


def merge(model: Any, directory: Path) -> None:
    """Adds an adapter of `write_adapters` to the weights: W += scale * B @ A, in fp32."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors, scale = load_file(directory / "adapter_model.safetensors"), config["lora_alpha"] / config["r"]
    for name, a in tensors.items():
        module, is_a, _ = name.partition(".lora_A.")
        if is_a:
            weight = model.get_submodule(module.removeprefix("base_model.model.")).weight
            b = tensors[f"{module}.lora_B.weight"].to(weight.device).float()
            weight.data = (weight.data.float() + scale * (b @ a.to(weight.device).float())).to(weight.dtype)


@torch.inference_mode()
def _below(model: Any, prompt: list[int], answer: list[int]) -> float:
    """How far the answer's worst token lies below the best one, in standard deviations of its step's scores."""
    ids = torch.tensor([prompt + answer[:-1]], device=model.device)
    scores = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    chosen = scores.gather(1, torch.tensor(answer, device=model.device)[:, None])[:, 0]
    return float(((scores.max(dim=1).values - chosen) / scores.std(dim=1)).max())
