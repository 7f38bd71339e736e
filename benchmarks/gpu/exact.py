"""A base of any shape with adapters, against the same base in fp32 with the adapter merged into its weights.

Drawn weights make close calls, so a token in bf16 may differ by rounding alone. What counts is how far below the
reference's best score a chosen token lies, in standard deviations of that step's scores, and how far below it lies what
PEFT chooses in the engine's dtype. As a control, the same distance for tokens that were chosen without the adapter: it
shows that the comparison would notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file

from benchmarks.gpu.engine import EngineBox
from cluster.messages import Adapter
from node_agent.device import DTYPES
from tests.support.local_engine import LocalEngine
from tests.support.random_model import random_loader, write_adapters

Answer = tuple[list[int], list[int]]

RANK = 16
LENGTHS = (40, 200, 600)
"""Prompt tokens; several chunks where `chunk_tokens` is less."""
ANSWER = 12
TOLERANCE = 0.15
"""Standard deviations of a step's scores: bf16 has eight bits, and a sum over layers loses two or three."""
OVER_PEFT = 2.0
"""Multiple of the distance of PEFT's own choices that is allowed as well, as their worst is a chance too."""


def merged(box: EngineBox, until: float) -> Iterator[dict[str, Any]]:
    """Greedy answers with and without an adapter, alone and in one batch."""
    del until  # passes of the reference for each answer
    engine, seed, dtype = box.get(), box.seed, DTYPES[box.dtype]
    (path,) = write_adapters(box.root / "merged", box.shape, RANK, 1, seed)
    adapter, model_dir = engine.deploy(path), engine.model_dir
    rng, longest = np.random.default_rng(seed), engine.engine.limits.max_context - ANSWER
    prompts = [rng.integers(3, engine.base.vocab_size, min(length, longest)).tolist() for length in LENGTHS]
    answers = _answers(engine, prompts, (None, adapter))
    base, adapted = ([answers[key, i] for i in range(len(prompts))] for key in (None, adapter.digest))
    del engine
    box.close()  # in fp32 the reference takes twice its room
    model: Any = random_loader(seed, "sdpa")(model_dir, box.device, dtype)
    choices = {"base": [_choose(model, *each) for each in base]}
    peft = PeftModel.from_pretrained(model, path)
    choices["adapter"] = [_choose(peft, *each) for each in adapted]
    model = peft.unload().float()
    worst = _worst(model, "base", base, choices)
    merge(model, path)
    worst |= _worst(model, "adapter", adapted, choices)
    worst["control_below"] = max(_below(model, *each) for each in base)
    yield worst | problem_of(worst)


def problem_of(worst: dict[str, float]) -> dict[str, str]:
    """Returns what is wrong with such figures, if anything is."""
    wrong = [
        f"{name}: {worst[f'{name}_below']:.3f} below the best, PEFT's {worst[f'{name}_peft_below']:.3f}"
        for name in ("base", "adapter")
        if worst[f"{name}_below"] > max(TOLERANCE, OVER_PEFT * worst[f"{name}_peft_below"])
    ]
    if worst["control_below"] <= 2 * max(TOLERANCE, worst["adapter_below"]):
        wrong.append(
            f"the adapter changes too little ({worst['control_below']:.3f}) for the comparison to mean anything"
        )
    return {"wrong": "; ".join(wrong)} if wrong else {}


def _worst(model: Any, name: str, answers: list[Answer], choices: dict[str, list[list[int]]]) -> dict[str, float]:
    return {
        f"{name}_below": max(_below(model, *each) for each in answers),
        f"{name}_peft_below": max(
            _below(model, *each, chosen) for each, chosen in zip(answers, choices[name], strict=True)
        ),
    }


def _answers(
    engine: LocalEngine, prompts: list[list[int]], adapters: tuple[Adapter | None, ...]
) -> dict[tuple[str | None, int], Answer]:
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
def _scores(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """f32[answer, vocab]: of each place of the answer."""
    ids = torch.tensor([prompt + answer[:-1]], device=model.device)
    scores: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
    return scores


def _choose(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """Returns the model's own choice at each place of the answer."""
    return _scores(model, prompt, answer).argmax(dim=1).tolist()


def _below(model: Any, prompt: list[int], answer: list[int], chosen: list[int] | None = None) -> float:
    """Returns the distance of the worst token below the best one, in standard deviations of its step's scores.

    Tokens are those of the answer, or those `chosen` in its place.
    """
    scores = _scores(model, prompt, answer)
    chosen_scores = scores.gather(1, torch.tensor(chosen or answer, device=model.device)[:, None])[:, 0]
    return float(((scores.max(dim=1).values - chosen_scores) / scores.std(dim=1)).max())
