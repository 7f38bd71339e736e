"""Adapters that are refused, made by PEFT or edited since, and the words for it; limits up to which they are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from peft_files import (
    Q0,
    adapter,
    changed,
    problems,
    read,
    write_tensors,
)

from adapters.base_model import BaseModel
from adapters.errors import MAX_PROBLEMS, Problem

GPT2 = Path(__file__).parents[1] / "data" / "adapters" / "gpt2-tigrinya-causal"


def test_a_gpt2_adapter_is_refused_naming_why(base: BaseModel) -> None:
    found = problems((GPT2 / "adapter_config.json").read_bytes(), GPT2 / "adapter_model.safetensors", base)
    assert found[0].tensor == "adapter_config.json#target_modules"
    assert "names no module of this base model" in found[0].problem
    assert "c_attn" in str(found[0].found)
    assert len(found) == 1, "its tensors are those of the modules that it names"


@pytest.mark.parametrize(
    ("fields", "marks"),
    [
        ({"use_dora": True}, ["use_dora", "DoRA"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"bias": "all"}, ["#bias"]),
        ({"target_modules": ["embed_tokens"]}, ["embed_tokens, which is not served", "LoRA on the embeddings"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["lm_head, which is not served"]),
        ({"lora_bias": True, "init_lora_weights": True}, ["lora_bias"]),
        ({"task_type": "FEATURE_EXTRACTION"}, ["task_type"]),
        ({"trainable_token_indices": [1, 2]}, ["trainable_token_indices"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights"]),
        ({"layer_replication": [[0, 2], [1, 3]]}, ["layer_replication"]),
    ],
)
def test_real_adapters_of_other_kinds_are_refused(
    tmp_path: Path, base: BaseModel, fields: dict[str, Any], marks: list[str]
) -> None:
    found = problems(*adapter(tmp_path / "adapter", **fields), base)
    text = "\n".join(f"{problem.tensor}: {problem.problem}" for problem in found)
    assert all(mark in text for mark in marks), text
    if "target_modules" not in fields:
        assert all(problem.tensor.startswith("adapter_config.json#") for problem in found), "the tensors only follow"


def test_every_tensor_of_a_wrong_shape_is_listed_with_both_shapes(good: Any, base: BaseModel) -> None:
    found = problems(changed(good[0], r=6), good[1], base)
    assert {problem.tensor for problem in found} == set(safetensors.torch.load_file(good[1]))
    one = next(problem for problem in found if problem.tensor == f"{Q0}.lora_A.weight")
    assert (one.problem, one.expected, one.found) == ("wrong shape for this base and rank", "[6, 32]", "[4, 32]")


def edited(good: tuple[bytes, Path], path: Path, edit: Any) -> Path:
    """The good adapter's weights after `edit(tensors)`."""
    tensors = safetensors.torch.load_file(good[1])
    edit(tensors)
    safetensors.torch.save_file(tensors, path)
    return path


def test_a_missing_half_is_named(tmp_path: Path, good: tuple[bytes, Path], base: BaseModel) -> None:
    weights = edited(good, tmp_path / "w", lambda tensors: tensors.pop(f"{Q0}.lora_B.weight"))
    found = problems(good[0], weights, base)
    assert [(problem.tensor, problem.expected) for problem in found] == [(f"{Q0}.lora_B.weight", "[32, 4]")]
    assert "missing" in found[0].problem


def renamed(rename: Callable[[str], str]) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[rename(name)] = tensors.pop(name)

    return edit


def two_adapters(tensors: dict[str, torch.Tensor]) -> None:
    for index, name in enumerate(list(tensors)):
        tensors[name.replace(".weight", f".{'ab'[index % 2]}.weight")] = tensors.pop(name)


def with_base_weights(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.base_layer.weight"] = torch.ones(32, 32)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (dict.clear, "it holds no tensors"),
        (two_adapters, "tensors of 2 adapters (a, b): save one"),
        (with_base_weights, "the base model's weights beside the adapter's"),
        (
            renamed(lambda name: name.removeprefix("base_model.model.").replace("lora_", "")),
            "a whole model's weights (12 tensors, no LoRA among them)",
        ),
        (
            renamed(lambda name: name[17:].lower().removesuffix(".weight")),
            "MLX",
        ),
        (renamed(lambda name: name.removeprefix("base_model.model.")), "none of its 12 tensors is named as PEFT"),
    ],
)
def test_files_of_something_else_are_told_in_one_problem(
    tmp_path: Path, good: tuple[bytes, Path], base: BaseModel, edit: Any, reason: str
) -> None:
    (found,) = problems(good[0], edited(good, tmp_path / "w", edit), base)
    assert found.tensor == "adapter_model.safetensors"
    assert reason in found.problem


def test_an_adapter_of_a_larger_base_is_told_in_one_problem(
    tmp_path: Path, good: tuple[bytes, Path], base: BaseModel
) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            rows, columns = tensor.shape
            tensors[name] = torch.ones(rows, columns * 2) if "lora_A" in name else torch.ones(rows * 2, columns)

    config = changed(good[0], base_model_name_or_path="acme/larger")
    (found,) = problems(config, edited(good, tmp_path / "w", widen), base)
    assert found.tensor == "adapter_config.json#base_model_name_or_path"
    assert "trained for another base model" in found.problem
    assert (found.expected, found.found) == ("32 to 32", "'acme/larger, 64 to 64'")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight", "the config does not target its module"),
        ("base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight", "maps to no projection"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "maps to no projection"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "maps to no projection"),
        (f"{Q0}.lora_A.default.weight", "carries an adapter's name (default) and other tensors' names do not"),
        (f"{Q0}.lora_C.weight", "maps to nothing"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "maps to nothing"),
        (f"{Q0}.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        ("base_model.model.lm_head.modules_to_save.weight", "whole module"),
        ("base_model.model.model.embed_tokens.weight", "the vocabulary has been resized"),
        ("base_model.model.lm_head.weight", "save_embedding_layers=False"),
        (f"{Q0}.lora_B.bias", "biases"),
        ("base_model.model.model.layers.٣.self_attn.q_proj.lora_A.weight", "maps to no projection"),
        ("x" * 5000, "maps to nothing"),
    ],
)
def test_tensors_that_map_to_nothing_are_refused(
    tmp_path: Path, good: tuple[bytes, Path], base: BaseModel, name: str, reason: str
) -> None:
    weights = edited(good, tmp_path / "w", lambda tensors: tensors.update({name: torch.ones(4, 32)}))
    found = problems(good[0], weights, base)
    assert [problem.tensor for problem in found] == [name[:300]]
    assert reason in found[0].problem


def test_a_config_that_can_not_be_read_is_the_only_problem(
    tmp_path: Path, good: tuple[bytes, Path], base: BaseModel
) -> None:
    for fields, named in (
        ({"r": "many"}, "r"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"target_modules": ["nothing"]}, "target_modules"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type"),
    ):
        found = problems(changed(good[0], **fields), good[1], base)
        assert [problem.tensor for problem in found] == [f"adapter_config.json#{named}"]
    assert "write CAUSAL_LM here" in found[0].problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(
    tmp_path: Path, good: tuple[bytes, Path], base: BaseModel, dtype: torch.dtype, value: float
) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
        tensors[f"{Q0}.lora_B.weight"][-1, -1] = value

    found = problems(good[0], edited(good, tmp_path / "w", poison), base)
    assert found == [Problem(f"{Q0}.lora_B.weight", "holds NaN or Infinity", "finite values")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_finite_values_are_served(
    tmp_path: Path, good: tuple[bytes, Path], base: BaseModel, dtype: torch.dtype
) -> None:
    def stretch(tensors: dict[str, torch.Tensor]) -> None:
        limit = torch.finfo(dtype)
        extremes = torch.tensor([limit.max, limit.min, limit.tiny, -0.0], dtype=dtype)
        tensors.update({name: extremes.repeat(t.numel() // 4).reshape(t.shape) for name, t in tensors.items()})

    assert read(good[0], edited(good, tmp_path / "w", stretch), base).ranks == (4,)


@pytest.mark.parametrize("rank", [1, 511, 512])
def test_ranks_up_to_the_limit_are_served(tmp_path: Path, base: BaseModel, rank: int) -> None:
    assert read(*adapter(tmp_path / "a", r=rank, target_modules=["down_proj"]), base).ranks == (rank,)


def test_a_rank_beyond_the_limit_is_refused(tmp_path: Path, base: BaseModel) -> None:
    found = problems(*adapter(tmp_path / "a", r=513, target_modules=["down_proj"]), base)
    assert "adapter_config.json#r" in {problem.tensor for problem in found}


def test_config_and_tensors_are_judged_together(tmp_path: Path, good: tuple[bytes, Path], base: BaseModel) -> None:
    weights = edited(good, tmp_path / "w", lambda tensors: tensors.update(extra=torch.tensor([float("nan")])))
    found = problems(changed(good[0], use_dora=True, mystery=1), weights, base)
    assert [problem.tensor for problem in found] == [
        "adapter_config.json#use_dora",
        "adapter_config.json#mystery",
        "extra",
        "extra",
    ]


def test_the_list_of_problems_is_bounded(tmp_path: Path, good: tuple[bytes, Path], base: BaseModel) -> None:
    extra = "base_model.model.model.layers.99.mlp.up_proj.lora_A.weight"
    many = {f"t{index}": ("F32", np.zeros(1, "f4")) for index in range(MAX_PROBLEMS * 2)}
    many[extra] = ("F32", np.zeros(1, "f4"))
    found = problems(good[0], write_tensors(tmp_path / "w", many), base)
    assert len(found) == MAX_PROBLEMS + 1
    assert "not listed" in found[-1].problem
    assert json.loads(good[0])["r"] == 4
