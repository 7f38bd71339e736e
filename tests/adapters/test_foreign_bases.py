"""Deploys to bases that only vLLM serves, checked against the manifest of their real modules."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model
from peft_files import changed, problems
from transformers import AutoModelForCausalLM

from adapters.base_manifest import (
    MANIFEST_VERSION,
    BaseManifest,
    base_from_manifest,
    find_base,
    manifest_key,
    store_manifest,
)
from adapters.base_model import BaseModel, OtherFamily, UnsupportedBase, fingerprint, load_base_model
from adapters.collect import ORPHAN_SECONDS, collect
from adapters.deployment import AdapterUpload
from adapters.errors import CorruptArtifact, CorruptRecord, InvalidAdapter
from adapters.inspector import Inspector
from adapters.local_store import LocalStore
from adapters.rank_limit import RankLimit
from adapters.registry import Registry
from adapters.store import all_objects
from adapters.verify import verify
from node_agent.base_inspection import NotInspected, inspect_base
from tests.support.foreign_bases import TARGETS, write_foreign_base

Files = tuple[bytes, Path]


class Foreign:
    """A tiny base, its manifest, and a good adapter on all its projections."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.directory = write_foreign_base(name, root / name)
        mark = fingerprint(self.directory)
        self.manifest = BaseManifest(MANIFEST_VERSION, name, mark, {}, False, inspect_base(self.directory))

    @property
    def base(self) -> BaseModel:
        return base_from_manifest(self.manifest, self.name)

    def adapter(self, folder: str, **fields: Any) -> Files:
        """A random adapter, saved by PEFT."""
        model = AutoModelForCausalLM.from_pretrained(self.directory)
        torch.manual_seed(0)
        config = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[self.name], "init_lora_weights": False, **fields}
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).save_pretrained(self.root / folder)
        found = self.root / folder
        return (found / "adapter_config.json").read_bytes(), found / "adapter_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Foreign]:
    return {name: Foreign(name, tmp_path_factory.mktemp(name)) for name in TARGETS}


@pytest.fixture(scope="module", params=list(TARGETS))
def foreign(request: pytest.FixtureRequest, made: dict[str, Foreign]) -> Foreign:
    return made[request.param]


@pytest.fixture(scope="module")
def files(foreign: Foreign) -> Files:
    return foreign.adapter("good")


@pytest.fixture
def registry(tmp_path: Path, foreign: Foreign) -> Registry:
    return Registry(LocalStore(tmp_path / "registry"), foreign.base)


def first(foreign: Foreign) -> str:
    """Name of a tensor of the first module that the good adapter changes."""
    projection = {"gemma3": "q_proj", "phi3": "qkv_proj"}[foreign.name]
    return f"base_model.model.model.layers.0.self_attn.{projection}"


def edited(files: Files, path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = safetensors.torch.load_file(files[1])
    edit(tensors)
    safetensors.torch.save_file(tensors, path)
    return path


def test_the_manifest_has_the_modules_of_transformers(foreign: Foreign) -> None:
    model = AutoModelForCausalLM.from_pretrained(foreign.directory)
    modules = {name: module for name, module in model.named_modules() if name}
    assert list(foreign.base.modules.names) == list(modules)
    linear = {name: module for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    found = foreign.base.modules.adaptable
    assert {name: module.widths for name, module in found.items()} == {
        name: (module.in_features, module.out_features) for name, module in linear.items() if name != "lm_head"
    }
    stated = foreign.manifest.base
    assert (stated.output, stated.decoder, stated.vocab_size, stated.max_context) == ("lm_head", "model", 512, 512)


def test_a_family_of_ours_has_the_modules_that_an_inspection_finds(base_dir: Path, base: BaseModel) -> None:
    """One form: the list of families, and the manifest of transformers' own modules, say the same."""
    inspected = inspect_base(base_dir)
    theirs = BaseManifest(MANIFEST_VERSION, "tiny", base.fingerprint, {}, False, inspected)
    modules = base_from_manifest(theirs, "tiny").modules
    assert set(modules.names) == set(base.modules.names)
    assert {n: m.widths for n, m in modules.adaptable.items()} == {
        n: m.widths for n, m in base.modules.adaptable.items()
    }
    assert list(modules.targets) == list(base.modules.targets)
    assert set(modules.all_linear) == set(base.modules.all_linear)


def test_a_deploy_stores_the_files_and_no_artifact(registry: Registry, foreign: Foreign, files: Files) -> None:
    done = registry.deploy("acme", "f", AdapterUpload(*files))
    short = [name.removesuffix("_proj") for name in TARGETS[foreign.name]]
    assert (done.ranks, sorted(done.targets), done.created) == ((4,), sorted(short), True)
    found = registry.resolve("acme", "f")
    assert (found.artifact_key, found.digest) == ("", done.digest)
    (entry,) = registry.function("acme", "f").versions
    assert (entry.artifact, entry.base) == (False, foreign.base.fingerprint)
    kinds = {info.key.partition("/")[0] for info in all_objects(registry.store, "")}
    assert kinds & {"artifacts", "blobs"} == {"blobs"}
    assert not registry.deploy("acme", "f", AdapterUpload(*files)).created
    assert registry.stage("acme", "f", AdapterUpload(*files)).version == found


def test_the_helper_process_checks_it_too(foreign: Foreign, files: Files, tmp_path: Path) -> None:
    inspector = Inspector(foreign.base)
    try:
        registry = Registry(LocalStore(tmp_path / "registry"), foreign.base, inspector.inspect)
        assert registry.check(AdapterUpload(*files)).ranks == (4,)
        with pytest.raises(InvalidAdapter, match="names no module of this base model"):
            registry.check(AdapterUpload(changed(files[0], target_modules=["c_attn"]), files[1]))
    finally:
        inspector.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"target_modules": ["c_attn"]}, "it names no module of this base model"),
        ({"target_modules": "all-linear", "r": 5}, "wrong shape for this base and rank"),
        ({"target_modules": ["down_proj", "lm_head"]}, "lm_head, which is not served: it computes the logits"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens, which is not served: it is an embedding"),
        ({"target_modules": ["down_proj", "input_layernorm"]}, "it is no linear module"),
        ({"r": 513}, "unusable rank"),
        ({"use_dora": True}, "DoRA is not served yet"),
        ({"target_modules": ["down_proj"]}, "the config does not target its module"),
        ({"target_modules": None}, "it names no module of this base model"),
    ],
)
def test_configs_are_checked_strictly(foreign: Foreign, files: Files, fields: dict[str, Any], reason: str) -> None:
    found = problems(changed(files[0], **fields), files[1], foreign.base)
    assert any(reason in problem.problem for problem in found), found


def test_tensors_are_checked_strictly(foreign: Foreign, files: Files, tmp_path: Path) -> None:
    name = first(foreign)
    whole = safetensors.torch.load_file(files[1])
    d_in, d_out = whole[f"{name}.lora_A.weight"].shape[1], whole[f"{name}.lora_B.weight"].shape[0]
    cases: list[tuple[Callable[[dict[str, torch.Tensor]], Any], str, str, str | None]] = [
        (lambda t: t.pop(f"{name}.lora_B.weight"), f"{name}.lora_B.weight", "missing", f"[{d_out}, 4]"),
        (
            lambda t: t.update({f"{name}.lora_A.weight": torch.ones(4, d_in + 1)}),
            f"{name}.lora_A.weight", "wrong shape for this base and rank", f"[4, {d_in}]",
        ),
        (
            lambda t: t.update({"base_model.model.model.layers.9.mlp.down_proj.lora_A.weight": torch.ones(4, 96)}),
            "base_model.model.model.layers.9.mlp.down_proj.lora_A.weight", "maps to no projection of this base model",
            foreign.base.modules.paths,
        ),
        (lambda t: t[f"{name}.lora_A.weight"].fill_(float("nan")), f"{name}.lora_A.weight", "NaN", "finite values"),
    ]  # fmt: skip
    for index, (edit, tensor, reason, expected) in enumerate(cases):
        (found,) = problems(files[0], edited(files, tmp_path / str(index), edit), foreign.base)
        assert (found.tensor, found.expected) == (tensor, expected)
        assert reason in found.problem


def test_an_adapter_of_another_family_is_refused(made: dict[str, Foreign], tmp_path: Path) -> None:
    """Gemma's q_proj on a base whose projection is fused."""
    found = problems(*made["gemma3"].adapter("split", target_modules=["q_proj"]), made["phi3"].base)
    assert "names no module of this base model (phi3, phi3)" in found[0].problem
    assert found[0].expected is not None and "qkv_proj" in found[0].expected
    assert all("maps to no projection of this base model" in problem.problem for problem in found[1:])


@pytest.mark.parametrize("fields", [{"r": 16}, {"rank_pattern": {"down_proj": 16}}])
def test_ranks_above_the_nodes_limit_are_refused(registry: Registry, foreign: Foreign, fields: dict[str, Any]) -> None:
    files = foreign.adapter("high", **fields)
    with pytest.raises(InvalidAdapter) as refused:
        registry.deploy("acme", "f", AdapterUpload(*files, rank_limit=RankLimit(8)))
    (problem,) = refused.value.problems
    assert (problem.tensor, problem.expected, problem.found) == (
        f"adapter_config.json#{next(iter(fields))}",
        "8",
        "16",
    )
    assert "above the largest rank" in problem.problem
    assert registry.deploy("acme", "f", AdapterUpload(*files, rank_limit=RankLimit(16))).created


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_foreign_base("mixtral", tmp_path / "mixtral")
    manifest = BaseManifest(MANIFEST_VERSION, "moe", fingerprint(directory), {}, False, inspect_base(directory))
    modules = base_from_manifest(manifest, "moe").modules
    assert set(modules.targets) == {"q", "k", "v", "o"}
    experts = [name for name in modules.names if re.search(r"experts|gate", name)]
    assert experts
    assert all("mixture of experts (MoE)" in modules.refusal(name) for name in experts)


def test_the_base_is_found_by_its_manifest(foreign: Foreign, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "registry")
    with pytest.raises(OtherFamily, match=r"set node\.engine: vllm"):
        load_base_model(foreign.directory)
    with pytest.raises(UnsupportedBase, match="garnish base inspect --store"):
        find_base(foreign.directory, "it", store)
    store_manifest(store, foreign.manifest)
    store_manifest(store, foreign.manifest)
    assert find_base(foreign.directory, "it", store) == msgspec.structs.replace(foreign.base, id="it")
    store.put(manifest_key(foreign.base.fingerprint), b"{")
    with pytest.raises(CorruptRecord):
        find_base(foreign.directory, "it", store)


def test_what_can_not_be_made_is_named(foreign: Foreign, tmp_path: Path) -> None:
    shutil.copytree(foreign.directory, tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_bytes())
    file.write_text(json.dumps({**config, "architectures": ["NewestForCausalLM"]}))
    with pytest.raises(NotInspected, match="no such class"):
        inspect_base(tmp_path / "base")
    file.write_text(json.dumps({**config, "model_type": "newest"}))
    with pytest.raises(NotInspected, match="can't make it"):
        inspect_base(tmp_path / "base")


def test_collect_and_verify_know_versions_without_artifacts(registry: Registry, foreign: Foreign, files: Files) -> None:
    store = registry.store
    store_manifest(store, foreign.manifest)
    registry.deploy("acme", "f", AdapterUpload(*files))
    registry.deploy("acme", "gone", AdapterUpload(changed(files[0], lora_alpha=9), files[1]))
    registry.delete_function("acme", "gone")
    later = time.time() + 3 * ORPHAN_SECONDS
    done = collect(store, now=later)
    assert (done.blobs, done.artifacts, done.manifests) == (1, 0, 1)
    told: list[Any] = []
    checked = verify(store, on_damage=told.append)
    assert (checked.versions, checked.objects, told) == (1, 3, [])
    assert find_base(foreign.directory, foreign.name, store).fingerprint == foreign.base.fingerprint
    store.put(f"blobs/sha256/{registry.manifest('acme', 'f', 1).weights_sha256}", b"damaged")
    verify(store, on_damage=told.append)
    assert [damage.problem for damage in told] == ["differs from what was written"]


def test_damaged_files_are_named_and_a_deploy_mends_them(registry: Registry, files: Files) -> None:
    registry.deploy("acme", "f", AdapterUpload(*files))
    key = f"blobs/sha256/{registry.manifest('acme', 'f', 1).weights_sha256}"
    registry.store.put(key, b"damaged")
    with pytest.raises(CorruptArtifact, match="deploy the adapter again"):
        registry.make_artifact("acme", "f", 1)
    with pytest.raises(CorruptArtifact):
        registry.resolve("acme", "f")
    registry.deploy("acme", "f", AdapterUpload(*files))
    assert registry.store.get(key).data == files[1].read_bytes()
    assert registry.resolve("acme", "f").version == 1


def test_versions_move_between_bases_with_and_without_artifacts(
    registry: Registry, made: dict[str, Foreign], base: BaseModel, files: Files, good: Files
) -> None:
    registry.deploy("acme", "f", AdapterUpload(*files))
    again = Registry(registry.store, msgspec.structs.replace(registry.base, fingerprint="e" * 64))
    assert [choice.pending for choice in again.choices("acme", "f")] == [True]
    assert again.resolve("acme", "f").digest == registry.resolve("acme", "f").digest
    assert [choice.pending for choice in again.choices("acme", "f")] == [False]
    ours = Registry(registry.store, base)
    with pytest.raises(InvalidAdapter):
        ours.resolve("acme", "f")
    ours.deploy("acme", "g", AdapterUpload(*good))
    with pytest.raises(InvalidAdapter):
        registry.resolve("acme", "g")
    assert ours.resolve("acme", "g").artifact_key
