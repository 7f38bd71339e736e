"""Adapters for tests: real ones, trained weights replaced by random numbers, and files broken in one chosen way."""

from __future__ import annotations

import copy
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from adapters.artifact import ArtifactHeader, check_layer
from adapters.base_model import BaseModel
from adapters.errors import InvalidAdapter, Problem
from adapters.peft_format import PeftAdapter, read_peft
from adapters.store import ObjectStore
from adapters.validate import LoraLayout, check_values, inspect

LAYERS = 3
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@cache
def made_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))


def tiny_model() -> PreTrainedModel:
    """A copy of one and the same model, for it takes longer to make."""
    return copy.deepcopy(made_model())


def peft_model(model: PreTrainedModel | None = None, **fields: Any) -> PeftModel:
    """A model with a random (not zero) adapter of the given LoraConfig fields."""
    fields = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"], **fields}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about configs that are legal and drawn here on purpose
        return get_peft_model(model or tiny_model(), LoraConfig(**fields))


def save(model: PeftModel, folder: Path) -> tuple[bytes, Path]:
    """Save as PEFT does; returns what a deploy takes: the config's bytes and the weights' path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return (folder / "adapter_config.json").read_bytes(), folder / "adapter_model.safetensors"


def adapter(folder: Path, **fields: Any) -> tuple[bytes, Path]:
    """A saved adapter of the tiny model."""
    model = tiny_model()
    torch.manual_seed(0)
    return save(peft_model(model, **fields), folder)


def changed(config: bytes, **fields: Any) -> bytes:
    """The config with some fields replaced."""
    return json.dumps({**json.loads(config), **fields}).encode()


def variant(files: tuple[bytes, Path], alpha: int) -> tuple[bytes, Path]:
    """Another adapter: the same tensors with another alpha."""
    return changed(files[0], lora_alpha=alpha), files[1]


def safetensors_bytes(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file from raw parts; `length` lies about the header's length."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def write_tensors(path: Path, tensors: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> Path:
    """A well-formed safetensors file of (dtype name, array) by name; bf16 comes as uint16 bits."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    path.write_bytes(safetensors_bytes(json.dumps(header).encode(), data))
    return path


def load(model: PreTrainedModel, folder: Path) -> PeftModel:
    """A saved adapter as PEFT loads it. Raises RuntimeError when shapes do not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model, str(folder))


def validate(adapter: PeftAdapter, base: BaseModel) -> LoraLayout:
    """Check the adapter against the base model, reading every tensor once.

    Raises InvalidAdapter with every problem of the config, of the mapping and of the tensors' values.
    """
    return check_values(inspect(adapter, base), adapter.weights)


def read(config: bytes, weights: Path, base: BaseModel) -> LoraLayout:
    return validate(read_peft(config, weights), base)


def problems(config: bytes, weights: Path, base: BaseModel) -> list[Problem]:
    with pytest.raises(InvalidAdapter) as raised:
        read(config, weights, base)
    return raised.value.problems


def read_layer(store: ObjectStore, key: str, header: ArtifactHeader, layer: int) -> bytes:
    """One layer's block, checked against its hash; empty if nothing is adapted there.

    Raises NotFound or CorruptArtifact.
    """
    block = header.layers[layer]
    if block.size == 0:
        return b""
    data = store.get_range(key, block.offset, block.size)
    check_layer(header, layer, data)
    return data
