"""Mapping and refusal, against adapters that PEFT made and against PEFT's own modules."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import PeftModel
from peft_files import ALL, LAYERS, adapter, changed, load, peft_model, save, tiny_model, write_tensors
from transformers import AutoModelForCausalLM

from adapters.artifact import read_header, read_layer, write_artifact
from adapters.base_model import BaseModel, load_base_model
from adapters.errors import MAX_PROBLEMS, InvalidAdapter, Problem
from adapters.local_store import LocalStore
from adapters.model_families import LLAMA
from adapters.peft_format import read_peft
from adapters.validate import LoraLayout, validate

GPT2 = Path(__file__).parents[1] / "data" / "adapters" / "gpt2-tigrinya-causal"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
MODEL = tiny_model()

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


def read(config: bytes, weights: Path, base: BaseModel) -> LoraLayout:
    return validate(read_peft(config, weights), base)


def problems(config: bytes, weights: Path, base: BaseModel) -> list[Problem]:
    with pytest.raises(InvalidAdapter) as raised:
        read(config, weights, base)
    return raised.value.problems


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
        model = peft_model(copy.deepcopy(MODEL), **fields)
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
        loaded = load(copy.deepcopy(MODEL), folder / "adapter")
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
    assert [[pair.projection for pair in pairs] for pairs in layout.layers] == [[0, 2]] * LAYERS
    assert {pair.scale for pairs in layout.layers for pair in pairs} == {2.0}


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


def test_a_gpt2_adapter_is_refused_naming_why(base: BaseModel) -> None:
    found = problems((GPT2 / "adapter_config.json").read_bytes(), GPT2 / "adapter_model.safetensors", base)
    assert found[0].tensor == "adapter_config.json#target_modules"
    assert "names no module of this base model" in found[0].problem
    assert "c_attn" in str(found[0].found)
    tensors = safetensors.torch.load_file(GPT2 / "adapter_model.safetensors")
    assert {problem.tensor for problem in found[1:]} == set(tensors)
    assert {problem.problem for problem in found[1:]} == {f"maps to no projection of this base model ({base.id})"}


@pytest.mark.parametrize(
    ("fields", "marks"),
    [
        ({"use_dora": True}, ["use_dora", "DoRA"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"bias": "all"}, ["#bias"]),
        ({"target_modules": ["embed_tokens"]}, ["embed_tokens, which is not served", "LoRA on the embeddings"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["lm_head, which is not served"]),
        ({"lora_bias": True, "init_lora_weights": True}, ["lora_bias", "biases are not served"]),
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
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "the config does not target its module"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "maps to no projection"),
        (f"{Q0}.lora_A.default.weight", "carries an adapter's name (default) and other tensors' names do not"),
        (f"{Q0}.lora_C.weight", "maps to nothing"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "maps to nothing"),
        (f"{Q0}.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        ("base_model.model.lm_head.modules_to_save.weight", "whole module"),
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


def test_other_dtypes_are_refused(tmp_path: Path, good: tuple[bytes, Path], base: BaseModel) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"].double()

    found = problems(good[0], edited(good, tmp_path / "w", widen), base)
    assert [(problem.tensor, problem.found) for problem in found] == [(f"{Q0}.lora_A.weight", "F64")]


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
