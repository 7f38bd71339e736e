"""Tiny random models of families that only vLLM serves, made by transformers, and PEFT's adapters of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MixtralConfig, Phi3Config, PreTrainedConfig

TARGETS = {
    "gemma3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
}
"""Names of the projections of each model, as users write them."""
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 96, "vocab_size": 512, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Heads have 64 elements: vLLM's attention on a CPU takes no 8."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def config_of(name: str) -> PreTrainedConfig:
    """Returns the config of a tiny model: `gemma3`, `phi3` or `mixtral`."""
    if name == "gemma3":
        return Gemma3TextConfig(**SIZES, head_dim=64, pad_token_id=0)
    if name == "phi3":
        return Phi3Config(**SIZES, pad_token_id=0)
    return MixtralConfig(**SIZES, head_dim=64, num_local_experts=4)


def write_foreign_base(name: str, directory: Path, tokenizer: Path | None = None) -> Path:
    """Writes the model with random weights, whose logits lie well apart, and returns its directory. `tokenizer`:
    directory of the model whose tokenizer it gets."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.06)
    model.save_pretrained(directory)
    for file in TOKENIZER_FILES if tokenizer is not None else ():
        if tokenizer is not None and (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, directory / file)
    return directory
