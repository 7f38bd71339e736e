"""Sizes of base models, against published ones and the parameters of real models of transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from adapters.base_manifest import MANIFEST_VERSION, BaseManifest, base_from_manifest
from adapters.base_sizes import (
    ROW_PARALLEL,
    BaseSizes,
    UnknownSizes,
    dtype_of,
    quantised_bits,
    sizes_from_config,
    sizes_of_foreign,
)
from node_agent.base_inspection import inspect_base
from tests.support.foreign_bases import SIZES, config_of

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "head_dim": 128,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_published_sizes() -> None:
    """The numbers of parameters in the models' own indexes, and the megabytes that a slot of rank 64 takes in vLLM."""
    llama, qwen = sizes_from_config(LLAMA_8B), sizes_from_config(QWEN3_32B)
    assert llama.linear + llama.rest == 8_030_261_248
    assert qwen.linear + qwen.rest == 32_762_123_264
    assert (llama.kv * 2, qwen.kv * 2) == (131_072, 262_144)
    assert (llama.per_rank() * 64 * 2, qwen.per_rank() * 64 * 2) == (335_544_320, 1_073_741_824)


def made(config: PreTrainedConfig, tied: bool) -> torch.nn.Module:
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def lora_elements(model: torch.nn.Module, targets: Any = "all-linear") -> tuple[int, int]:
    """Returns the elements of PEFT's A and B matrices of rank 1."""
    adapted: Any = get_peft_model(model, LoraConfig(r=1, target_modules=targets))  # type: ignore[arg-type]
    shapes = {name: each.numel() for name, each in adapted.named_parameters() if each.requires_grad}
    return sum(n for name, n in shapes.items() if "lora_A" in name), sum(
        n for name, n in shapes.items() if "lora_B" in name
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
        MistralConfig(**SIZES, head_dim=64),
        Qwen2Config(**SIZES),
        Qwen3Config(**SIZES, head_dim=32, attention_bias=True),
    ],
    ids=lambda config: config.model_type,
)
def test_families_have_the_parameters_of_transformers(config: PreTrainedConfig, tied: bool) -> None:
    model = made(config, tied)
    sizes = sizes_from_config(config.to_dict())
    assert sizes.linear + sizes.rest == sum(each.numel() for each in model.parameters())
    assert (sum(sizes.inputs), sum(sizes.outputs)) == lora_elements(model)
    assert sizes.per_rank() == sum(sizes.inputs) + sum(sizes.outputs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "phi3"])
def test_other_bases_have_the_parameters_of_their_manifest(name: str, tied: bool, tmp_path: Path) -> None:
    config = config_of(name)
    model = made(config, tied)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    base = base_from_manifest(BaseManifest(MANIFEST_VERSION, name, "f", {}, False, inspect_base(tmp_path)), name)
    assert base.foreign is not None
    sizes = sizes_of_foreign(base, base.foreign)
    assert sizes.linear + sizes.rest == sum(each.numel() for each in model.parameters())
    ends = 2 * (SIZES["hidden_size"] + SIZES["vocab_size"])
    assert sum(sizes.inputs) + sum(sizes.outputs) - ends == sum(lora_elements(model))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * 2
    width = getattr(config, "head_dim", None) or SIZES["hidden_size"] // SIZES["num_attention_heads"]
    assert sizes.kv == 2 * kinds.count("full_attention") * SIZES["num_key_value_heads"] * width


def test_tensor_parallelism_divides_one_matrix_of_each_pair() -> None:
    sizes = sizes_from_config(LLAMA_8B)
    by_column = 32 * (5 * 4096), 32 * (4096 + 2 * 1024 + 2 * 14336)
    by_row = 32 * (4096 + 14336), 32 * 2 * 4096
    assert (sizes.inputs, sizes.outputs) == ((by_column[0], by_row[0]), (by_column[1], by_row[1]))
    assert sizes.per_rank(2) == by_column[0] + by_column[1] // 2 + by_row[0] // 2 + by_row[1]
    assert sizes.per_rank(2, divided=True) == sizes.per_rank() // 2
    assert {"o_proj", "down_proj"} <= set(ROW_PARALLEL)


def test_quantised_weights_are_smaller_and_the_rest_is_not() -> None:
    sizes = BaseSizes(linear=1000, rest=10, kv=1, context=1, inputs=(0, 0), outputs=(0, 0))
    assert (sizes.weights(4), sizes.weights(2), sizes.weights(2, 8), sizes.weights(2, 4)) == (4040, 2020, 1020, 520)


@pytest.mark.parametrize(
    ("settings", "argument", "bits"),
    [
        (None, None, None),
        (None, "fp8", 8),
        (None, "bitsandbytes", 4),
        (None, "a new one", 4),
        ({"quant_method": "awq", "bits": 4}, None, 4),
        ({"quant_method": "gptq", "bits": 8}, "gptq_marlin", 8),
        ({"quant_method": "fp8"}, None, 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, None, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": None}}, None, 4),
    ],
)
def test_bits_of_quantised_weights(settings: Any, argument: str | None, bits: int | None) -> None:
    assert quantised_bits({"quantization_config": settings}, argument) == bits


def test_the_dtype_of_a_config() -> None:
    assert dtype_of({}) == "float32"
    assert dtype_of({"torch_dtype": "float16"}) == "float16"
    assert dtype_of({"text_config": {"dtype": "bfloat16"}}) == "bfloat16"


def test_a_config_without_numbers_is_refused() -> None:
    with pytest.raises(UnknownSizes, match=r"whole numbers above 0.* for hidden_size, head_dim$"):
        sizes_from_config({**LLAMA_8B, "hidden_size": None, "head_dim": [64]})
