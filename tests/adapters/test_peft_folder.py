"""Folders for vLLM: each form that a deploy accepts is one that vLLM takes, and PEFT reads the same adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from adapters.base_model import load_base_model
from adapters.inspector import inspect_once
from adapters.peft_config import HARMLESS_INITS
from adapters.peft_folder import make_loadable
from adapters.validate import LoraLayout, check_values
from tests.support.peft_reference import make_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ["q_proj", "o_proj", "down_proj"]
Edit = Callable[[dict[str, Any]], Any]
BASE_MODULES = ["model.layers.0.self_attn.q_proj"]


def without(*names: str) -> Edit:
    return lambda config: [config.pop(name) for name in names]


def setting(**fields: Any) -> Edit:
    return lambda config: config.update(fields)


FORMS: dict[str, tuple[dict[str, Any], Edit, bool]] = {
    "as saved": ({"r": 4, "lora_alpha": 8, "target_modules": TARGETS}, setting(), False),
    "without rank and alpha": ({"r": 8, "lora_alpha": 8, "target_modules": TARGETS}, without("r", "lora_alpha"), False),
    "without its targets": ({"r": 4, "target_modules": ["q_proj", "v_proj"]}, without("target_modules"), False),
    "a rank that no module has": (
        {"r": 64, "rank_pattern": {"[qo]_proj": 4, "down_proj": 2}, "target_modules": TARGETS}, setting(), False,
    ),
    "a pattern that matches nothing": (
        {"r": 4, "target_modules": TARGETS}, setting(rank_pattern={"absent_proj": 128}), False,
    ),
    "its name in the tensors": ({"r": 4, "target_modules": TARGETS, "use_rslora": True}, setting(), True),
    "a pattern and no rank": (
        {"r": 8, "rank_pattern": {"q_proj": 16}, "alpha_pattern": {"o_proj": 3}, "target_modules": TARGETS},
        without("r"), True,
    ),
    "nulls": ({"r": 4, "target_modules": TARGETS}, setting(exclude_modules=None, layers_pattern=None), False),
    "numbers as texts": (
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}, "target_modules": TARGETS},
        setting(r="4", lora_alpha="8.0", rank_pattern={"q_proj": "2"}), False,
    ),
    **{
        f"initialised by {init}": ({"r": 4, "target_modules": TARGETS}, setting(init_lora_weights=init), False)
        for init in HARMLESS_INITS
    },
}  # fmt: skip
"""By name: arguments of PEFT's LoraConfig, a change of the saved config, and whether tensors carry a name."""


def made(name: str, model: Path, folder: Path) -> tuple[Path, LoraLayout]:
    """Returns an adapter of this form, which the check of deploys accepts, and its layout."""
    fields, edit, named = FORMS[name]
    make_adapter(model, folder, 3, **fields)
    config = json.loads((folder / CONFIG).read_bytes())
    edit(config)
    (folder / CONFIG).write_text(json.dumps(config))
    if named:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
        renamed = {key.replace(".weight", ".default.weight"): each for key, each in tensors.items()}
        safetensors.torch.save_file(renamed, folder / WEIGHTS)
    base = load_base_model(model)
    inspection = inspect_once((folder / CONFIG).read_bytes(), folder / WEIGHTS, base)
    return folder, check_values(inspection, folder / WEIGHTS)


@pytest.mark.parametrize("name", FORMS)
def test_peft_reads_the_same_adapter(name: str, stories_dir: Path, tmp_path: Path) -> None:
    folder, layout = made(name, stories_dir, tmp_path / "a")
    before = shutil.copytree(folder, tmp_path / "before")
    size = (folder / WEIGHTS).stat().st_size
    make_loadable(folder, layout.ranks, BASE_MODULES)
    again = check_values(
        inspect_once((folder / CONFIG).read_bytes(), folder / WEIGHTS, load_base_model(stories_dir)), folder / WEIGHTS
    )
    assert [(p.module, p.rank, p.scale) for p in again.pairs] == [(p.module, p.rank, p.scale) for p in layout.pairs]
    config = json.loads((folder / CONFIG).read_bytes())
    assert config["r"] in layout.ranks and {"lora_alpha", "target_modules"} <= set(config)
    assert max(config["r"], *(config.get("rank_pattern") or {0: 1}).values()) == max(layout.ranks)
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    old = safetensors.torch.load_file(before / WEIGHTS)
    assert (folder / WEIGHTS).stat().st_size == size
    assert not any(".default." in key for key in tensors)
    for key, tensor in old.items():
        assert torch.equal(tensors[key.replace(".default.", ".")], tensor)
    if name == "as saved":
        assert (folder / CONFIG).read_bytes() == (before / CONFIG).read_bytes()


@pytest.mark.parametrize("part", ["_orig_mod.base_model.model.model.", "base_model.model.model.language_model."])
def test_a_wrappers_part_and_a_bom_are_removed(part: str, stories_dir: Path, tmp_path: Path) -> None:
    folder, layout = made("its name in the tensors", stories_dir, tmp_path / "a")
    plain = safetensors.torch.load_file(folder / WEIGHTS)
    renamed = {name.replace("base_model.model.model.", part): each for name, each in plain.items()}
    safetensors.torch.save_file(renamed, folder / WEIGHTS)
    (folder / CONFIG).write_bytes(b"\xef\xbb\xbf" + (folder / CONFIG).read_bytes())
    base = load_base_model(stories_dir)
    wrapped = check_values(inspect_once((folder / CONFIG).read_bytes(), folder / WEIGHTS, base), folder / WEIGHTS)
    assert [(p.module, p.rank, p.scale) for p in wrapped.pairs] == [(p.module, p.rank, p.scale) for p in layout.pairs]
    make_loadable(folder, layout.ranks, base.modules.names)
    found = safetensors.torch.load_file(folder / WEIGHTS)
    assert found.keys() == {name.replace(".default.", ".") for name in plain}
    assert all(torch.equal(found[name.replace(".default.", ".")], tensor) for name, tensor in plain.items())
    assert (folder / CONFIG).read_text().startswith("{")


def test_parts_that_the_base_itself_has_stay(stories_dir: Path, tmp_path: Path) -> None:
    """A multimodal base's own modules are in its language model."""
    folder, layout = made("as saved", stories_dir, tmp_path / "a")
    plain = safetensors.torch.load_file(folder / WEIGHTS)
    renamed = {name.replace("model.layers", "model.language_model.layers"): each for name, each in plain.items()}
    safetensors.torch.save_file(renamed, folder / WEIGHTS)
    make_loadable(folder, layout.ranks, ["model.language_model.layers.0.self_attn.q_proj"])
    assert safetensors.torch.load_file(folder / WEIGHTS).keys() == renamed.keys()


def test_files_that_can_not_be_read_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_bytes(b"[]")
    for content in (b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / WEIGHTS).write_bytes(content)
        make_loadable(tmp_path, (4,), BASE_MODULES)
        assert (tmp_path / WEIGHTS).read_bytes() == content
    assert (tmp_path / CONFIG).read_bytes() == b"[]"
