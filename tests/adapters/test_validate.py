"""Mapping, against adapters that PEFT made and against PEFT's own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from peft_files import (
    ALL,
    LAYERS,
    Q0,
    changed,
    load,
    peft_model,
    read,
    read_layer,
    save,
    tiny_model,
    validate,
)
from transformers import AutoModelForCausalLM

from adapters.artifact import read_header, write_artifact
from adapters.base_model import BaseModel, load_base_model
from adapters.errors import InvalidAdapter
from adapters.local_store import LocalStore
from adapters.model_families import LLAMA
from adapters.peft_format import read_peft

_names = st.sampled_from(ALL)
_patterns = st.sampled_from(
    [
        *(*ALL, "self_attn.q_proj", "layers.1.self_attn.v_proj", "^model.layers.0.mlp.up_proj", "proj"),
        *(r".*\.0\..*_proj", r"layers\.[12]\.(self_attn|mlp)\.\w+", r"(k|v)_proj$", r".*"),
    ]
)
_regexes = st.sampled_from(
    [
        *(".*_proj", r".*\.(q|v)_proj", r"model\.layers\.[02]\.mlp\.(up|down)_proj", "all-linear", "ALL-LINEAR"),
        *(r"model\.layers\.1\.self_attn\..*_proj", "model.layers.0.self_attn.q_proj"),
    ]
)
_full = st.builds(lambda n, path: f"model.layers.{n}.{path}", st.integers(0, 2), st.sampled_from(LLAMA.projections))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """LoraConfig fields over everything that is served."""
    listed = draw(st.booleans())
    fields: dict[str, Any] = {
        "r": draw(st.integers(1, 9)),
        "lora_alpha": draw(st.integers(1, 64) | st.floats(0.25, 32)),
        "use_rslora": draw(st.booleans()),
        "rank_pattern": draw(st.dictionaries(_patterns, st.integers(1, 12), max_size=3)),
        "alpha_pattern": draw(st.dictionaries(_patterns, st.integers(1, 40), max_size=3)),
        "target_modules": draw(st.lists(_names | _full, min_size=1, max_size=6) if listed else _regexes),
        "exclude_modules": draw(st.none() | st.lists(_names | _full, max_size=2) | st.sampled_from([r".*\.2\..*"])),
    }
    if listed:
        layers = st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=2, unique=True)
        fields["layers_to_transform"] = draw(st.none() | layers | st.integers(0, LAYERS - 1))
        if fields["layers_to_transform"] is not None:
            fields["layers_pattern"] = draw(st.none() | st.sampled_from(["layers", ["h", "layers"]]))
    return fields


def artifact_tensors(store: LocalStore, key: str, base: BaseModel) -> dict[str, tuple[float, Any, Any]]:
    """module -> (scale, A [r, d_in], B [d_out, r]) in float32, read back through the store."""
    header = read_header(store, key)
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    found = {}
    for layer, block in enumerate(header.layers):
        data = read_layer(store, key, header, layer)
        for pair in block.pairs:
            d_in, d_out = base.widths[pair.projection]

            def rows(offset: int, width: int, rank: int = pair.rank, data: bytes = data) -> torch.Tensor:
                flat = torch.frombuffer(bytearray(data), dtype=kinds[header.dtype], offset=offset, count=rank * width)
                return flat.reshape(rank, width).float()

            module = f"model.layers.{layer}.{LLAMA.projections[pair.projection]}"
            found[module] = (pair.scale, rows(pair.a_offset, d_in), rows(pair.b_offset, d_out).T)
    return found


def peft_tensors(model: PeftModel) -> dict[str, tuple[float, Any, Any]]:
    """The same from PEFT's own modules."""
    return {
        name.removeprefix("base_model.model."): (
            module.scaling["default"],
            module.lora_A["default"].weight.detach().float(),
            module.lora_B["default"].weight.detach().float(),
        )
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and "default" in module.lora_A
    }


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(fields=configs(), dtypes=st.sampled_from(["float32", "float16", "bfloat16", "mixed"]), seed=st.integers(0, 99))
def test_artifacts_hold_what_peft_computes_with(
    tmp_path_factory: pytest.TempPathFactory, base: BaseModel, fields: dict[str, Any], dtypes: str, seed: int
) -> None:
    torch.manual_seed(seed)
    try:
        model = peft_model(**fields)
    except ValueError:
        assume(False)  # PEFT too finds no module, or finds one that is not Linear
    kinds = [torch.float32, torch.float16, torch.bfloat16]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            kind = kinds[(index + seed) % 3] if dtypes == "mixed" else getattr(torch, dtypes)
            parameter.data = parameter.data.to(kind)
    folder = tmp_path_factory.mktemp("drawn")
    config, weights = save(model, folder / "adapter")
    # What counts is PEFT after loading: saving sorts the patterns, so another of several that match may come first.
    try:
        loaded = load(tiny_model(), folder / "adapter")
    except RuntimeError:
        with pytest.raises(InvalidAdapter, match="wrong shape"):
            read(config, weights, base)
        return
    layout = read(config, weights, base)
    header = write_artifact(layout, base, weights, folder / "artifact")
    store = LocalStore(folder / "store")
    store.put_if_absent("artifact", folder / "artifact")
    assert read_header(store, "artifact") == header
    ours, theirs = artifact_tensors(store, "artifact", base), peft_tensors(loaded)
    assert ours.keys() == theirs.keys()
    for module, (scale, a, b) in theirs.items():
        assert ours[module][0] == scale
        assert torch.equal(ours[module][1], a)
        assert torch.equal(ours[module][2], b)
    assert layout.ranks == tuple(sorted({a.shape[0] for _, a, _ in theirs.values()}))
    assert layout.dtype == (dtypes if dtypes != "mixed" else header.dtype)


def test_the_demo_adapters_hold_what_peft_computes_with(
    tmp_path: Path, stories_dir: Path, stories_adapters: dict[str, Path]
) -> None:
    base = load_base_model(stories_dir)
    store = LocalStore(tmp_path / "store")
    for name, folder in stories_adapters.items():
        weights = folder / "adapter_model.safetensors"
        layout = read((folder / "adapter_config.json").read_bytes(), weights, base)
        write_artifact(layout, base, weights, tmp_path / name)
        store.put_if_absent(name, tmp_path / name)
        theirs = peft_tensors(load(AutoModelForCausalLM.from_pretrained(stories_dir), folder))
        ours = artifact_tensors(store, name, base)
        assert ours.keys() == theirs.keys()
        assert all(ours[module][0] == scale for module, (scale, _, _) in theirs.items())
        assert all(torch.equal(ours[module][i], theirs[module][i]) for module in theirs for i in (1, 2))


def test_a_plain_layout(good: tuple[bytes, Path], base: BaseModel) -> None:
    layout = read(*good, base)
    assert (layout.ranks, layout.targets, layout.dtype, layout.warnings) == ((4,), ("q", "v"), "float32", ())
    assert layout.bytes == LAYERS * 4 * (4 * 32 + 4 * 32 + 4 * 32 + 4 * 16)
    modules = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(LAYERS) for name in "qv"]
    assert [pair.module for pair in layout.pairs] == modules
    assert {pair.scale for pair in layout.pairs} == {2.0}


def test_the_digest_follows_tensors_and_scaling_only(good: tuple[bytes, Path], base: BaseModel, tmp_path: Path) -> None:
    config, weights = good
    digest = read(config, weights, base).digest
    for same in ({"peft_version": "9"}, {"lora_dropout": 0.5}, {"revision": "x"}, {"base_model_name_or_path": "other"}):
        assert read(changed(config, **same), weights, base).digest == digest
    others = [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"layers.1.self_attn.q_proj": 5}}]
    digests = {read(changed(config, **other), weights, base).digest for other in others}
    assert len(digests | {digest}) == 4
    tensors = safetensors.torch.load_file(weights)
    tensors[f"{Q0}.lora_A.weight"][0, 0] += 1
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    assert read(config, tmp_path / "w.safetensors", base).digest != digest


def test_another_name_of_the_base_only_warns(good: tuple[bytes, Path], base: BaseModel) -> None:
    config, weights = good
    assert "meta/other" in read(changed(config, base_model_name_or_path="meta/other"), weights, base).warnings[0]
    assert read(changed(config, base_model_name_or_path="someone/Tiny-Llama/"), weights, base).warnings == ()


@pytest.mark.parametrize("name", ["default", "my-adapter", "mein_Ädapter"])
def test_names_of_peft_s_state_dict_are_served(
    tmp_path: Path, good: tuple[bytes, Path], base: BaseModel, name: str
) -> None:
    """`lora_A.NAME.weight`: the artifact is the one of the same adapter as `save_pretrained` names its tensors."""
    tensors = safetensors.torch.load_file(good[1])
    renamed = {key.replace(".weight", f".{name}.weight"): tensor for key, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, tmp_path / "w")
    layout = validate(read_peft(good[0], tmp_path / "w"), base)
    plain = validate(read_peft(*good), base)
    assert (layout.ranks, layout.targets, layout.bytes) == (plain.ranks, plain.targets, plain.bytes)
    headers = [
        write_artifact(found, base, weights, tmp_path / f"artifact-{index}")
        for index, (found, weights) in enumerate(((layout, tmp_path / "w"), (plain, good[1])))
    ]
    assert [block.sha256 for block in headers[0].layers] == [block.sha256 for block in headers[1].layers]


def test_the_state_dict_of_a_real_peft_model_is_served(tmp_path: Path, base: BaseModel) -> None:
    """As trainers write it that save `model.state_dict()` without the base's weights."""
    torch.manual_seed(0)
    model = peft_model()
    save(model, tmp_path)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if "lora_" in name}
    assert all(".default." in name for name in state)
    safetensors.torch.save_file(state, tmp_path / "w")
    layout = validate(read_peft((tmp_path / "adapter_config.json").read_bytes(), tmp_path / "w"), base)
    assert layout.targets == ("q", "v")
