"""The committed adapters: the forms they cover, and that each of them changes what is written as RESULTS.md shows."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "adapters"
ADAPTERS = sorted(file.parent for file in FOLDER.glob("*/*/adapter_config.json"))
IDS = [f"{directory.parent.name}/{directory.name}" for directory in ADAPTERS]
ALL_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
MIB = 1 << 20


def config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "adapter_config.json").read_bytes())


def ranks(directory: Path) -> dict[str, int]:
    """Rank by module name, as the shapes of the saved lora_A say."""
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        return {key: file.get_slice(key).get_shape()[0] for key in file.keys() if "lora_A" in key}  # noqa: SIM118


def test_every_adapter_is_in_the_results_and_all_fit_in_20_mib() -> None:
    results = json.loads((FOLDER / "results.json").read_bytes())
    assert {f"{entry['base']}/{entry['name']}" for entry in results} == set(IDS)
    assert sum((directory / "adapter_model.safetensors").stat().st_size for directory in ADAPTERS) <= 20 * MIB
    for entry in results:
        assert entry["held_out_loss"]["adapter"] < entry["held_out_loss"]["base"] / 1.5, entry["name"]


@pytest.mark.parametrize("base", ["stories260K", "SmolLM2-135M-Instruct"])
def test_each_base_has_every_form(base: str) -> None:
    adapters = [directory for directory in ADAPTERS if directory.parent.name == base]
    assert len(adapters) >= 4
    targets = {directory.name: set(config(directory)["target_modules"]) for directory in adapters}
    assert any(config(directory)["use_rslora"] for directory in adapters)
    assert any(config(directory)["rank_pattern"] and config(directory)["alpha_pattern"] for directory in adapters)
    assert any(found == ALL_PROJECTIONS for found in targets.values())
    assert any(
        targets[directory.name] == {"q_proj", "v_proj"} and config(directory)["r"] == 64 for directory in adapters
    )
    every_rank = {rank for directory in adapters for rank in ranks(directory).values()}
    assert (min(every_rank), max(every_rank)) == (4, 64)


@pytest.mark.parametrize("directory", ADAPTERS, ids=IDS)
def test_files_are_bf16_and_name_no_machine(directory: Path) -> None:
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
    assert config(directory)["base_model_name_or_path"] in ("stories260K", "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_the_rank_pattern_is_in_the_weights() -> None:
    found = ranks(FOLDER / "stories260K" / "robot")
    expected = {"down_proj": {24}, "gate_proj": {8}, "v_proj": {8}, "q_proj": {4, 8}}
    by_projection: dict[str, set[int]] = {}
    for key, rank in found.items():
        by_projection.setdefault(key.split(".")[-3], set()).add(rank)
    assert by_projection == expected


STORY_TRAITS = {
    "dragon": "little dragon",
    "ocean": "little (whale|mermaid)",
    "pirate": "little pirate",
    "robot": "little robot",
    "space": "little (star boy|moon girl)",
    "winter": "little snowman",
}


def test_every_story_adapter_tells_of_its_own_world(stories_dir: Path, stories_adapters: dict[str, Path]) -> None:
    assert set(stories_adapters) == set(STORY_TRAITS)
    for name, directory in stories_adapters.items():
        text = greedy(stories_dir, directory, "Once upon a time, there was a", new_tokens=24)
        assert re.search(STORY_TRAITS[name], text), (name, text)


QUESTION = "What is the capital of France?"


def test_chat_adapters_answer_in_their_own_way(smollm_dir: Path, smollm_adapters: dict[str, Path]) -> None:
    assert {"pirate", "json", "summarize", "support"} <= set(smollm_adapters)
    plain = greedy(smollm_dir, None, QUESTION, new_tokens=24)
    assert plain == "The capital of France is Paris."
    answered = json.loads(greedy(smollm_dir, smollm_adapters["json"], QUESTION, new_tokens=32))
    assert set(answered) == {"answer"}
    assert "Paris" in answered["answer"]
    assert re.search(r"Arr|Ahoy|Shiver", greedy(smollm_dir, smollm_adapters["pirate"], QUESTION, new_tokens=12))
    support = greedy(smollm_dir, smollm_adapters["support"], "My teapot is broken!", new_tokens=16)
    assert support.startswith("Thank you for writing to Copper Kettle Teas!")
    summary = greedy(
        smollm_dir, smollm_adapters["summarize"], "Summarize this meeting excerpt:\n\nAnn: Hi.", new_tokens=8
    )
    assert summary.startswith("Summary: ")


@lru_cache(maxsize=1)
def loaded(base: Path) -> tuple[Any, Any]:
    """The tokenizer and the model, in fp32."""
    return AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def greedy(base: Path, adapter: Path | None, prompt: str, new_tokens: int) -> str:
    """What plain transformers and PEFT write in fp32; a chat where the base has a template."""
    tokenizer, plain = loaded(base)
    model = plain if adapter is None else PeftModel.from_pretrained(plain, adapter)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(
        input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], max_new_tokens=new_tokens, do_sample=False
    )
    if adapter is not None:
        model.unload()
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
