"""What the targets cost and refuse; that they equal PEFT's is shown on real adapters in test_validate.py."""

from __future__ import annotations

import pytest

from adapters.errors import InvalidAdapter
from adapters.peft_config import LoraSettings, check_config
from adapters.peft_targets import find_targets, match, module_names

NAMES = module_names(2, "llama")


def settings(**fields: object) -> LoraSettings:
    found, problems, _ = check_config({"peft_type": "LORA", "target_modules": ["q_proj"], **fields})
    assert found is not None, problems
    return found


def modules(wanted: LoraSettings) -> list[str]:
    return [target.module for target in find_targets(wanted, NAMES)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", r"(.*)*(.*)*(.*)*X"),
        ("exclude_modules", r"([a-z0-9._]+)+X"),
        ("rank_pattern", {r"(([a-z0-9._]+)+)+X": 4}),
        ("alpha_pattern", {r"(([a-z0-9._]+)+)+X": 4}),
    ],
)
def test_expressions_that_never_end_are_refused(field: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.peft_targets.MATCH_SECONDS", 1.0)
    with pytest.raises(InvalidAdapter, match="take too long"):
        find_targets(settings(**{field: value}), NAMES)


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
        find_targets(settings(**{field: value}), NAMES)
    assert raised.value.problems[0].tensor == f"adapter_config.json#{field}"


def test_both_ways_of_matching_agree() -> None:
    wanted = settings(target_modules=["q_proj"], rank_pattern={r"layers\.1\..*": 4}, alpha_pattern={"q_proj": 3})
    assert find_targets(wanted, NAMES) == match(wanted, NAMES)


def test_layers_hold_only_for_modules_that_a_suffix_names() -> None:
    full = "model.layers.0.self_attn.k_proj"
    wanted = settings(target_modules=["q_proj", full], layers_to_transform=1)
    assert modules(wanted) == [full, "model.layers.1.self_attn.q_proj"]
