"""Bases and adapters of any shape with drawn weights: a 7B that no disk holds, made on the device from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from node_agent.runner.transformers_runner import ATTENTION, LoadModel, register_attention

SHAPES: dict[str, dict[str, int]] = {
    "7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 4096,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096,
    },
}  # fmt: skip
TARGETS = ("q_proj", "k_proj", "v_proj")

HALF_SHAPE = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rope_theta": 5000.0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
HALF_TOLERANCE = 4e-3
"""Of logits up to 1.8 of a model that `write_half_llama` wrote: twice what Hugging Face and PEFT in fp16 differ there
from themselves in fp32 (2e-3); an adapter changes some logit by 0.9 or more."""


def write_half_llama(directory: Path, vocab_size: int, seed: int = 3) -> Path:
    """A tiny Llama in fp16, with heads as wide as LightLLM's kernels want them and logits that lie well apart."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**HALF_SHAPE, vocab_size=vocab_size))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.06)
    model.half().save_pretrained(directory)
    return directory


def write_base(directory: Path, shape: str, seed: int) -> Path:
    """What identifies the base: its config.json, and the seed in the place of weights."""
    directory.mkdir(parents=True)
    config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=False, dtype="bfloat16").to_dict()
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    save_file({"seed": torch.tensor([seed])}, directory / "model.safetensors")
    return directory


def random_loader(seed: int, attention: str = ATTENTION) -> LoadModel:
    """In the place of `load_model`: the weights are drawn on the device, the same ones for the same seed."""

    def load(directory: Path, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
        register_attention()
        config = LlamaConfig.from_pretrained(directory)
        torch.manual_seed(seed)
        with device:
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype or torch.bfloat16, attn_implementation=attention
            )
        found: PreTrainedModel = model.eval().requires_grad_(False).to(device)
        return found

    return load


def random_weights(runner: str, seed: int, device: torch.device) -> Callable[..., Any]:
    """Returns what the runner's `open_runner` takes as `load`: the weights of `random_loader`."""
    if runner != "lightllm":
        return random_loader(seed)

    def load(directory: Path, dtype: torch.dtype | None) -> Any:
        from node_agent.runner import lightllm_layers  # it can be imported where its runner is being opened

        config = LlamaConfig.from_pretrained(directory)
        dtype = lightllm_layers.checked_dtype(directory, config, dtype)
        weights = random_loader(seed)(directory, device, dtype).state_dict()
        return lightllm_layers.LightllmModel(lightllm_layers.lightllm_config(config), weights, dtype)

    return load


def write_adapters(root: Path, shape: str, rank: int, count: int, seed: int) -> list[Path]:
    """`count` adapters on q, k and v: one set of weights, under a scaling of its own for each."""
    size, generator = SHAPES[shape], torch.Generator().manual_seed(seed + rank)
    hidden = size["hidden_size"]
    tensors = {}
    for layer in range(size["num_hidden_layers"]):
        for target in TARGETS:
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = _noise((rank, hidden), hidden**-0.5, generator)
            tensors[f"{name}.lora_B.weight"] = _noise((hidden, rank), 0.5 * rank**-0.5, generator)
    found: list[Path] = []
    for i in range(count):
        directory = root / f"r{rank}-{i}"
        directory.mkdir(parents=True)
        file = directory / "adapter_model.safetensors"
        if found:
            file.hardlink_to(found[0] / file.name)
        else:
            save_file(tensors, file, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank + i / 1000, "bias": "none",
            "target_modules": list(TARGETS),
        }  # fmt: skip
        (directory / "adapter_config.json").write_text(json.dumps(config))
        found.append(directory)
    return found


def _noise(shape: tuple[int, int], spread: float, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * spread).to(torch.bfloat16)
