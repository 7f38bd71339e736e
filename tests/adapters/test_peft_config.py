"""The config's rules against the real LoraConfig."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from peft_files import changed, peft_model, read, tiny_model

from adapters.base_model import BaseModel
from adapters.model_families import FAMILIES
from adapters.modules import family_modules
from adapters.peft_config import HARMLESS, OTHER_COMPUTATION, REFUSED, SERVED, TRAINERS, TRAINING, check_config
from adapters.strict_json import loads


def plain(**fields: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        **fields,
    }


def fields_in_trouble(config: dict[str, Any]) -> list[str]:
    _, problems, _ = check_config(config)
    return [problem.tensor.removeprefix("adapter_config.json#") for problem in problems]


def test_every_field_of_the_real_config_has_a_rule() -> None:
    real = {field.name for field in dataclasses.fields(LoraConfig)}
    assert real == {*SERVED, *HARMLESS, *REFUSED}
    assert not set(SERVED) & set(HARMLESS) and not set(SERVED) & set(REFUSED) and not set(HARMLESS) & set(REFUSED)


def test_a_default_config_as_peft_saves_it_is_accepted(tmp_path: Path) -> None:
    LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]).save_pretrained(tmp_path)
    settings, problems, warnings = check_config(loads((tmp_path / "adapter_config.json").read_bytes()))
    assert (problems, warnings) == ([], [])
    assert settings is not None
    assert (settings.rank, settings.alpha, settings.use_rslora) == (8, 8.0, False)


def test_absent_fields_have_the_defaults_of_peft() -> None:
    settings, problems, _ = check_config({"peft_type": "LORA"})
    assert problems == []
    assert settings is not None
    real = LoraConfig()
    assert (settings.rank, settings.alpha, settings.use_rslora) == (real.r, real.lora_alpha, real.use_rslora)
    assert (settings.rank_pattern, settings.alpha_pattern) == (real.rank_pattern, real.alpha_pattern)
    assert settings.target_modules is real.target_modules is None


@pytest.mark.parametrize("field", sorted({field.name for field in dataclasses.fields(LoraConfig)} - {"peft_type"}))
def test_null_is_accepted_where_peft_reads_it_as_the_default(field: str) -> None:
    fields = {name: value for name, value in plain(**{field: None}).items() if name != "peft_type"}
    try:
        peft_model(**{"init_lora_weights": True, **fields})
    except Exception:
        return  # what PEFT does not load may be refused
    assert fields_in_trouble(plain(**{field: None})) == []


def test_refused_fields_hold_none_false_or_nothing_by_default() -> None:
    defaults = {field.name: getattr(LoraConfig(), field.name) for field in dataclasses.fields(LoraConfig)}
    assert {field: defaults[field] for field in REFUSED if defaults[field] not in (None, False)} == {}


def test_default_targets_are_those_of_peft() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    assert set(FAMILIES) >= {"llama", "mistral", "qwen2", "qwen3"}
    for model_type, family in FAMILIES.items():
        assert tuple(DEFAULTS.get(model_type) or ()) == family.default_targets


def test_module_names_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    models = [tiny_model()]
    models += [
        AutoModelForCausalLM.from_config(kind(**sizes, **heads)) for kind in (MistralConfig, Qwen2Config, Qwen3Config)
    ]
    for model in models:
        real = {name for name, _ in model.named_modules() if name}
        family = FAMILIES[model.config.model_type]
        assert real == set(family_modules(family, model.config.num_hidden_layers, 32, 64, [(32, 32)] * 7).names)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("peft_type", ["LORA"]),
        ("task_type", "SEQ_CLS"),
        ("task_type", "FEATURE_EXTRACTION"),
        ("task_type", ["CAUSAL_LM"]),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "PiSSA"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "unheard_of"),
        ("init_lora_weights", 1),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [5]),
        ("trainable_token_indices", {"embed_tokens": [5]}),
        ("megatron_config", {"a": 1}),
        ("velora_config", {"a": 1}),
        ("kasa_config", {"a": 1}),
        ("arrow_config", {"a": 1}),
        ("use_bdlora", {"a": 1}),
        ("monteclora_config", {"a": 1}),
        ("field_of_the_future", "on"),
        ("field_of_the_future", 0),
        ("r", 0),
        ("r", -1),
        ("r", 513),
        ("r", 8.0),
        ("r", True),
        ("r", "eight"),
        ("r", "-8"),
        ("r", "8.5"),
        ("r", "0"),
        ("r", None),
        ("lora_alpha", "0x8"),
        ("lora_alpha", "nan"),
        ("lora_alpha", None),
        ("lora_alpha", 1e31),
        ("lora_alpha", 10**400),
        ("use_rslora", 1),
        ("target_modules", [1]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", ["q_proj"] * 3000),
        ("exclude_modules", 3),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", "q_proj"),
        ("layers_to_transform", "0"),
        ("layers_to_transform", [0, "1"]),
        ("layers_pattern", "layers"),
        ("base_model_name_or_path", 5),
    ],
)
def test_other_values_are_refused_by_name(field: str, value: object) -> None:
    assert fields_in_trouble(plain(**{field: value})) == [field]


def test_patterns_name_their_entry() -> None:
    assert fields_in_trouble(plain(rank_pattern={"q_proj": 0, "v_proj": 4})) == ["rank_pattern.q_proj"]
    assert fields_in_trouble(plain(alpha_pattern={"q_proj": "x"})) == ["alpha_pattern.q_proj"]
    assert fields_in_trouble(plain(target_modules=".*q_proj", layers_to_transform=[0])) == ["layers_to_transform"]


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica", "Gaussian"])
def test_initialisations_that_leave_the_base_alone_are_served(init: object) -> None:
    assert fields_in_trouble(plain(init_lora_weights=init)) == []


def test_harmless_fields_may_hold_anything() -> None:
    config = plain(**dict.fromkeys(HARMLESS, "anything"))
    assert fields_in_trouble(json.loads(json.dumps(config))) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lorap_lr_ratio", 16.0),
        ("lora_dtype", "bf16"),
        ("unsloth_version", "2026.1"),
        ("axolotl_config_path", "qlora.yml"),
        ("cutoff_len", 2048),
        ("loraplus_lr_ratio", 4),
        ("merge_weights", True),
        ("_from_model_config", True),
    ],
)
def test_notes_of_trainers_are_ignored_with_a_warning(field: str, value: object) -> None:
    _, problems, warnings = check_config(plain(**{field: value}))
    assert problems == []
    assert warnings == [f"{field} in adapter_config.json is ignored: only the training run is concerned"]


def test_one_warning_names_all_ignored_fields() -> None:
    _, problems, warnings = check_config(plain(**{f"unsloth_{index}": 1 for index in range(30)}))
    assert problems == []
    assert len(warnings) == 1 and "unsloth_19 and 10 more in adapter_config.json are ignored" in warnings[0]


def test_trainers_notes_are_no_fields_that_peft_reads() -> None:
    real = {field.name for field in dataclasses.fields(LoraConfig)}
    assert not real & (TRAINING | set(OTHER_COMPUTATION))
    assert not [name for name in real if name.startswith(TRAINERS)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("enable_lora", [True, False, True]), ("use_qa_lora", True), ("model_key_mapping", {"a": "b"}), ("lora_rank", 4)],
)
def test_fields_of_other_libraries_that_may_change_the_result_are_refused(field: str, value: object) -> None:
    assert fields_in_trouble(plain(**{field: value})) == [field]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}, "a whole model's config.json"),
        ({"fine_tune_type": "lora", "lora_parameters": {"rank": 8}, "num_layers": 16}, "MLX"),
    ],
)
def test_configs_of_something_else_are_told_in_one_problem(config: dict[str, Any], told: str) -> None:
    settings, (problem,), _ = check_config(config)
    assert settings is None
    assert told in problem.problem


def test_fan_in_fan_out_is_ignored_with_a_warning() -> None:
    _, problems, warnings = check_config(plain(fan_in_fan_out=True))
    assert problems == []
    assert "fan_in_fan_out" in warnings[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"r": "4"},
        {"lora_alpha": "8"},
        {"lora_alpha": " 8.0 "},
        {"r": "4", "lora_alpha": "8", "rank_pattern": {"q_proj": "4"}, "alpha_pattern": {"q_proj": "8"}},
    ],
)
def test_numbers_as_texts_are_read_with_a_warning(
    fields: dict[str, Any], good: tuple[bytes, Path], base: BaseModel
) -> None:
    layout, plain = read(changed(good[0], **fields), good[1], base), read(*good, base)
    assert layout.pairs == plain.pairs
    (warning,) = layout.warnings
    assert warning.endswith("written as text, and read as the number in it")
    assert all(name in warning for name in fields)


def test_a_bom_before_the_config_is_ignored_with_a_warning(good: tuple[bytes, Path], base: BaseModel) -> None:
    layout = read(b"\xef\xbb\xbf" + good[0], good[1], base)
    assert layout.pairs == read(*good, base).pairs
    assert layout.warnings == ("adapter_config.json begins with a BOM, a byte order mark, which is ignored",)
