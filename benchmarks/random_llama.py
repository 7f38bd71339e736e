"""A Llama with random weights, for shapes of which no trained model is at hand: they cost as much to compute."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_random_llama(target: Path, layers: int = 12, seed: int = 0, width: int = 768) -> Path:
    """Write a Llama with 12 heads and GPT-2's vocabulary, tied, in bf16; there is no tokenizer."""
    config = LlamaConfig(
        vocab_size=50_257,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=12,
        max_position_embeddings=2_048,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    return target
