"""Hugging Face PEFT alone: the reference for what an adapter's output must be, and a generator of drawn adapters."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIE = 1e-4
"""Two best logits closer than this may be swapped by another order of additions."""
STRENGTH = 0.25
"""How large a part a drawn adapter computes beside the projection's input. It is enough to change what is written, and
not so much that rounding grows from layer to layer: fp32 must come closer to the true logits than TIE."""


def draw_adapter(rng: random.Random, num_layers: int) -> dict[str, Any]:
    """LoraConfig arguments over the forms that Garnish serves."""
    targets = rng.choice([["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj"], ALL_TARGETS, None])
    if targets is None:
        targets = rng.sample(ALL_TARGETS, rng.randint(1, 7))
    rank = rng.choice([1, 2, 3, 4, 7, 8, 16, 32, 64])
    arguments: dict[str, Any] = {
        "r": rank,
        "lora_alpha": rng.choice([1, rank, 2 * rank, 16]),
        "target_modules": targets,
    }
    if rng.random() < 0.3:
        arguments["use_rslora"] = True
    if rng.random() < 0.3:
        some = rng.sample(targets, rng.randint(1, len(targets)))
        arguments["rank_pattern"] = {name: rng.choice([1, 5, 8, 24]) for name in some}
    if rng.random() < 0.2:
        arguments["alpha_pattern"] = {rng.choice(targets): rng.choice([1, 8, 32])}
    if rng.random() < 0.25:
        arguments["layers_to_transform"] = sorted(rng.sample(range(num_layers), rng.randint(1, num_layers)))
    return arguments


def make_adapter(model_dir: Path, out: Path, seed: int, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """Write a PEFT adapter with random weights, as strong in all its projections whatever their ranks and alphas."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    wrapped.save_pretrained(out)
    generator = torch.Generator().manual_seed(seed)
    file = out / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in sorted(tensors.items()):
        spread = tensor.shape[1] ** -0.5
        projection, is_b, _ = name.partition(".lora_B.")
        if is_b:
            layer: Any = wrapped.get_submodule(projection)
            spread *= STRENGTH / layer.scaling["default"]
        tensors[name] = (torch.randn(tensor.shape, generator=generator) * spread).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return out


def redraw_adapter(source: Path, out: Path, seed: int) -> Path:
    """An adapter like `source`, with other random weights that are as strong."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "adapter_model.safetensors")
    for name, tensor in sorted(tensors.items()):
        spread = float(tensor.float().std())
        tensors[name] = (torch.randn(tensor.shape, generator=generator) * spread).to(tensor.dtype)
    out.mkdir(parents=True)
    shutil.copyfile(source / "adapter_config.json", out / "adapter_config.json")
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    return out


def pad_adapter(source: Path, out: Path, rank: int) -> Path:
    """The same adapter with every rank raised to `rank` by zeros: it computes the same, and as much as the largest.

    `source` has one rank and one alpha for all its projections.
    """
    config = json.loads((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    more = rank - config["r"]
    for name, tensor in tensors.items():
        # lora_A.weight is [r, d_in], lora_B.weight [d_out, r]
        padding = (0, 0, 0, more) if "lora_A" in name else (0, more)
        tensors[name] = torch.nn.functional.pad(tensor, padding).contiguous()
    out.mkdir(parents=True)
    padded = {**config, "r": rank, "lora_alpha": config["lora_alpha"] * rank / config["r"]}
    (out / "adapter_config.json").write_text(json.dumps(padded))
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    return out


@dataclass(frozen=True)
class Greedy:
    """What PEFT writes, and how far apart its two best logits were at each token."""

    tokens: list[int]
    gaps: list[float]


class PeftReference:
    """One base model in fp32; adapters are loaded from their directories and run one at a time."""

    def __init__(self, model_dir: Path, dtype: torch.dtype = torch.float32) -> None:
        self.base: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        self._wrapped: Any = None
        """The base as a PeftModel, from its first adapter on"""
        self._loaded: set[str] = set()

    def model(self, adapter: Path | None) -> torch.nn.Module:
        """The model that runs with this adapter alone, or the plain base."""
        if adapter is None:
            if self._wrapped is not None:
                self._wrapped.base_model.disable_adapter_layers()
            return self.base
        name = str(adapter).replace(".", "_")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._wrapped is None:
                self._wrapped = PeftModel.from_pretrained(self.base, adapter, adapter_name=name).eval()
            elif name not in self._loaded:
                self._wrapped.load_adapter(adapter, adapter_name=name)
        self._loaded.add(name)
        self._wrapped.base_model.enable_adapter_layers()
        self._wrapped.set_adapter(name)
        wrapped: torch.nn.Module = self._wrapped
        return wrapped

    def greedy(self, adapter: Path | None, prompt: list[int], count: int, eos: frozenset[int] = frozenset()) -> Greedy:
        """`count` tokens, or fewer when one of `eos` comes (it is included)."""
        tokens: list[int] = []
        gaps: list[float] = []
        for token, gap in islice(self.steps(adapter, prompt), count):
            tokens.append(token)
            gaps.append(gap)
            if token in eos:
                break
        return Greedy(tokens, gaps)

    @torch.inference_mode()
    def steps(self, adapter: Path | None, prompt: list[int]) -> Iterator[tuple[int, float]]:
        """Yields greedy tokens without end, each with the distance between its two best logits."""
        model = self.model(adapter)
        step = torch.tensor([prompt])
        past = None
        while True:
            out = model(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            best = out.logits[0, -1].float().topk(2)
            yield int(best.indices[0]), float(best.values[0] - best.values[1])
            step = best.indices[:1].unsqueeze(0)

    @torch.inference_mode()
    def logits(self, adapter: Path | None, ids: list[int], last: int = 0) -> torch.Tensor:
        """f32[T, V], teacher-forced; of the `last` positions alone, unless that is 0."""
        out = self.model(adapter)(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=last)
        found: torch.Tensor = out.logits[0].float()
        return found
