"""What the targets cost and refuse; that they equal PEFT's is shown on real adapters in test_validate.py."""

from __future__ import annotations

import pytest

from adapters.errors import InvalidAdapter
from adapters.model_families import LLAMA
from adapters.modules import family_modules
from adapters.peft_config import LoraSettings, check_config
from adapters.peft_targets import find_targets

MODULES = family_modules(LLAMA, 2, 32, 64, [(32, 32)] * 7)


def settings(**fields: object) -> LoraSettings:
    found, problems, _ = check_config({"peft_type": "LORA", "target_modules": ["q_proj"], **fields})
    assert found is not None, problems
    return found


def modules(wanted: LoraSettings) -> list[str]:
    return [target.module for target in find_targets(wanted, MODULES)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", "(q_proj"),
        ("target_modules", "*"),
        ("exclude_modules", "[a"),
        ("rank_pattern", {"q_proj(": 4}),
        ("alpha_pattern", {"(?P<a": 4}),
        ("target_modules", "(" * 5000 + ")" * 5000),
    ],
)
def test_texts_that_are_no_expressions_are_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidAdapter, match="not a regular expression") as raised:
        find_targets(settings(**{field: value}), MODULES)
    assert raised.value.problems[0].tensor == f"adapter_config.json#{field}"


def test_layers_hold_only_for_modules_that_a_suffix_names() -> None:
    full = "model.layers.0.self_attn.k_proj"
    wanted = settings(target_modules=["q_proj", full], layers_to_transform=1)
    assert modules(wanted) == [full, "model.layers.1.self_attn.q_proj"]
