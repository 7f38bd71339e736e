"""Bases that can't be served are refused before a process starts, with the reason and the way out in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from garnish.base_check import check_base
from garnish.errors import StartError
from garnish.up.prepare import UpOptions, prepare, state_directory

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
CASES = Path("tests/garnish/data/bases")
Change = Callable[[Path], Any]


def config(**fields: Any) -> Change:
    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_bytes()) | fields))

    return change


def case(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CASES / name).read_bytes())
    return found


def pointer(name: str) -> Change:
    return lambda directory: (directory / name).write_text(POINTER)


def removed(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def shorter(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def listed(directory: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def as_bin(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


OTHERS = {
    "gemma2": config(**case("gemma2_config.json")),
    "phi3": config(model_type="phi3", architectures=["Phi3ForCausalLM"]),
    "qwen3_moe": config(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"]),
    "qwen2_vl": config(model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"], vision_config={}),
}


@pytest.fixture
def base(stories_dir: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(stories_dir, directory)
    return directory


def refusal(base: Path, engine: str = "garnish") -> str:
    with pytest.raises(StartError) as refused:
        check_base(base, engine)
    message = str(refused.value)
    assert message.startswith("base_model: ") and "\n" not in message
    return message


@pytest.mark.parametrize("kind", OTHERS)
def test_another_family_is_named_with_what_is_served_and_the_way_out(base: Path, kind: str) -> None:
    OTHERS[kind](base)
    message = refusal(base)
    assert kind in message and "llama, mistral, qwen2, qwen3" in message and "node.engine: vllm" in message
    assert ("images" in message) == (kind == "qwen2_vl")


@pytest.mark.parametrize(
    ("quantised", "method"),
    [
        (case("quantization_config_bnb.json"), "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_quantised_weights_are_refused_for_our_own_engine_only(base: Path, quantised: Any, method: str) -> None:
    config(quantization_config=quantised.get("quantization_config", quantised))(base)
    assert re.search(rf"quantised \({method}\).*float16.*node.engine: vllm", refusal(base))
    assert check_base(base, "vllm") == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (removed("model.safetensors"), "no weight files, and .*safetensors files are read"),
        (as_bin, r"its weights are in pytorch_model.bin, and .*safetensors.*save_pretrained"),
        (listed, "model-00002-of-00002.safetensors is missing"),
        (shorter, r"bytes; fetch it again"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b""), "no whole safetensors file"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"\4" + bytes(7) + b"{{{{"), "not readable"),
        (removed("tokenizer.json"), r"no tokenizer.json; fetch it, or write it with transformers: AutoTokenizer"),
        (lambda directory: (directory / "tokenizer.json").write_text("{}"), "is no tokenizer that can be read"),
        (lambda directory: (directory / "tokenizer_config.json").write_text("{"), "is not readable JSON"),
        *((pointer(name), f"{name}: a Git LFS pointer.*git lfs pull") for name in
          ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")),
        (config(hidden_size=None), "hidden_size must be numbers"),
        (config(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not served"),
    ],
)  # fmt: skip
def test_files_that_are_missing_or_not_whole_are_named(base: Path, change: Change, reason: str) -> None:
    change(base)
    assert re.search(reason, refusal(base))


def test_a_broken_template_is_a_warning(base: Path) -> None:
    assert check_base(base, "garnish") == ""
    (base / "chat_template.jinja").write_text("{% for %}")
    assert re.fullmatch(
        r"base_model: the base model's chat template can't be compiled: .*", check_base(base, "garnish")
    )


def test_nothing_is_made_before_the_base_is_checked(base: Path, tmp_path: Path) -> None:
    removed("tokenizer.json")(base)
    file = tmp_path / "serverless.yml"
    file.write_text(f"service: demo\nbase_model: {base}\n")
    with state_directory(tmp_path / "state") as state, pytest.raises(StartError, match=r"no tokenizer\.json"):
        prepare(UpOptions(file=file, state=state), state)
    assert [entry.name for entry in (tmp_path / "state").iterdir()] == ["up.lock"]
