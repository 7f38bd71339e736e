"""The training text: the same at every run, and of the form that the adapters are to learn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoTokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "adapters"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("train")


def test_text_is_the_same_at_every_run(train: ModuleType) -> None:
    for name in ("pirate", "json", "summarize", "support"):
        assert train.pairs(name, seed=3) == train.pairs(name, seed=3) != train.pairs(name, seed=4)
    for name in ("dragon", "ocean"):
        assert train.stories(name, 5, seed=3) == train.stories(name, 5, seed=3) != train.stories(name, 5, seed=4)


def test_answers_have_the_form_of_their_adapter(train: ModuleType) -> None:
    assert all(set(json.loads(answer)) == {"answer"} for _, answer in train.pairs("json", seed=1))
    assert all(answer.startswith("Summary: ") for _, answer in train.pairs("summarize", seed=1))
    assert all("Copper Kettle Teas" in answer for _, answer in train.pairs("support", seed=1))


def test_only_the_answer_and_its_end_count_for_the_loss(train: ModuleType, smollm_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm_dir)
    ids, labels = train.chat_example(tokenizer, "Who are you?", "A pirate.")
    counted = [label for label in labels if label != train.IGNORED]
    assert tokenizer.decode(counted) == "A pirate.<|im_end|>"
    assert ids[-len(counted) :] == counted
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\nA pirate.<|im_end|>")


def test_probes_are_not_in_the_training_text(train: ModuleType) -> None:
    for recipe in train.RECIPES:
        if recipe.base != train.STORIES:
            asked = {question for question, _ in train.pairs(recipe.name, train.SEED)}
            assert asked.isdisjoint(recipe.probes)
