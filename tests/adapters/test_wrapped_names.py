"""Adapters whose tensors' names carry a wrapper's part: served exactly as those without it, or refused in one
problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft_files import adapter, changed, peft_model, problems, read, save

from adapters.artifact import write_artifact
from adapters.base_model import BaseModel
from adapters.validate import LoraLayout

Rename = Callable[[str], str]
INNER = "base_model.model.model."

WRAPPED: dict[str, tuple[str, Rename]] = {
    "compiled outside": ("`_orig_mod.`", lambda name: f"_orig_mod.{name}"),
    "compiled inside": ("`_orig_mod.`", lambda name: name.replace(INNER, "base_model.model._orig_mod.model.")),
    "compiled layers": ("`_orig_mod.`", lambda name: name.replace(".self_attn", "._orig_mod.self_attn")),
    "fsdp": (
        "`_fsdp_wrapped_module.` and `_fsdp_wrapped_module.`",
        lambda name: "_fsdp_wrapped_module." + name.replace(".self_attn", "._fsdp_wrapped_module.self_attn"),
    ),
    "fsdp with checkpoints": (
        "`_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.`",
        lambda name: name.replace(".self_attn", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn"),
    ),
    "distributed": ("`module.`", lambda name: f"module.{name}"),
    "distributed inside": ("`module.`", lambda name: name.replace(INNER, "base_model.model.module.model.")),
    "multimodal": ("`language_model.`", lambda name: name.replace(INNER, f"{INNER}language_model.")),
    "multimodal before": (
        "`language_model.`",
        lambda name: name.replace(INNER, "base_model.model.language_model.model."),
    ),
    "and an adapter's name": ("`module.`", lambda name: f"module.{name}".replace(".weight", ".module.weight")),
}


def renamed(weights: Path, target: Path, rename: Rename) -> Path:
    tensors = safetensors.torch.load_file(weights)
    safetensors.torch.save_file({rename(name): each for name, each in tensors.items()}, target)
    return target


def layers(layout: LoraLayout, base: BaseModel, weights: Path, out: Path) -> list[Any]:
    """What nodes compute with: ranks, scalings and values."""
    header = write_artifact(layout, base, weights, out)
    return [(block.sha256, block.pairs) for block in header.layers]


@pytest.mark.parametrize("name", WRAPPED)
def test_the_wrapped_adapter_is_the_one_without(
    name: str, good: tuple[bytes, Path], base: BaseModel, tmp_path: Path
) -> None:
    shown, rename = WRAPPED[name]
    weights = renamed(good[1], tmp_path / "w", rename)
    layout, plain = read(good[0], weights, base), read(*good, base)
    assert layers(layout, base, weights, tmp_path / "one") == layers(plain, base, good[1], tmp_path / "two")
    assert [(pair.module, pair.rank, pair.scale) for pair in layout.pairs] == [
        (pair.module, pair.rank, pair.scale) for pair in plain.pairs
    ]
    (warning,) = layout.warnings
    assert f"names have {shown}" in warning


def test_patterns_are_those_of_the_multimodal_model(base: BaseModel, tmp_path: Path) -> None:
    """Trainers of multimodal models write regular expressions and full names, which have `language_model` in them."""
    torch.manual_seed(0)
    config, weights = save(
        peft_model(
            target_modules=["q_proj", "v_proj"],
            rank_pattern={"model.layers.1.self_attn.q_proj": 2},
            alpha_pattern={"model.layers.0.self_attn.v_proj": 3},
        ),
        tmp_path / "plain",
    )
    plain = read(config, weights, base)
    wrapped = renamed(weights, tmp_path / "w", WRAPPED["multimodal"][1])
    fields = {
        "target_modules": r"(?:.*?language.*?(?:self_attn|mlp).*?(?:q_proj|v_proj))",
        "rank_pattern": {"model.language_model.layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"model.language_model.layers.0.self_attn.v_proj": 3},
    }
    layout = read(changed(config, **fields), wrapped, base)
    assert layers(layout, base, wrapped, tmp_path / "one") == layers(plain, base, weights, tmp_path / "two")
    assert layout.ranks == (2, 8)


def test_ambiguous_patterns_are_refused(good: tuple[bytes, Path], base: BaseModel, tmp_path: Path) -> None:
    """With the wrapper's part in the modules' names this pattern has another meaning than without it."""
    weights = renamed(good[1], tmp_path / "w", WRAPPED["compiled inside"][1])
    config = changed(good[0], alpha_pattern={"_orig_mod.model.layers.0.self_attn.q_proj": 64})
    (found,) = problems(config, weights, base)
    assert "other modules or ranks with `_orig_mod.` in the modules' names" in found.problem


def only_layer(number: int, rename: Rename) -> Rename:
    return lambda name: rename(name) if f".layers.{number}." in name else name


@pytest.mark.parametrize(
    ("rename", "says"),
    [
        (only_layer(0, WRAPPED["compiled layers"][1]), "have `_orig_mod.` in their names, and 8 have not, such as"),
        (
            lambda name: only_layer(0, WRAPPED["distributed"][1])(only_layer(1, WRAPPED["compiled outside"][1])(name)),
            "have `_orig_mod.` or `module.` in their names, and 4 have not",
        ),
        (
            lambda name: WRAPPED["multimodal"][1](name).replace("q_proj", "qkv"),
            "without that 6 of the 12 tensors do not",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(
    rename: Rename, says: str, good: tuple[bytes, Path], base: BaseModel, tmp_path: Path
) -> None:
    (found,) = problems(good[0], renamed(good[1], tmp_path / "w", rename), base)
    assert says in found.problem
    assert (found.tensor, "more problems" in found.problem) == ("adapter_model.safetensors", False)


def test_tensors_that_are_missing_are_counted(base: BaseModel, tmp_path: Path) -> None:
    config, weights = adapter(tmp_path / "adapter")
    wanted = changed(config, target_modules=["q_proj", "v_proj", "o_proj"])
    (found,) = problems(wanted, renamed(weights, tmp_path / "w", WRAPPED["multimodal"][1]), base)
    assert "0 of the 12 tensors do not fit" in found.problem
    assert "6 that the config targets are missing; the first: " in found.problem
    assert json.loads(config)["peft_type"] == "LORA"
