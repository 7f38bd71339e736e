"""The study of bf16's rounding: what it books of log probabilities, and that it would see another adapter's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.common.adapters import make_adapters
from benchmarks.exactness.rounding import Errors, answers, apart, hold, same_texts
from node_agent.ipc import Top
from tests.benchmarks.studies import run_study
from tests.support.local_engine import LocalEngine, Outcome
from tests.support.peft_reference import PeftReference

PROMPTS = [[1, 5, 9, 40], [1, *range(60, 90)]]


def test_errors_of_distances_and_flips() -> None:
    exact = torch.tensor([[-0.5, -1.0, -3.0], [-2.0, -0.25, -1.0]])
    errors = Errors()
    errors.add(exact, torch.tensor([0.5, 0.25]), torch.tensor([0, 2]), torch.tensor([[0, 1], [2, 1]]))
    assert errors.distances == [0.0, 1.0]
    assert errors.flips == [0.75]
    row = errors.row("x")
    assert (row["tokens"], row["most"], row["flips"], row["flip_gap"]) == (2, 1.0, 1, 0.75)


def outcome(*tokens: int) -> Outcome:
    return Outcome(list(tokens), logprobs=[Top(-0.5, [(token, -0.5), (0, -0.75 - token)]) for token in tokens])


def test_texts_apart_and_alike() -> None:
    assert apart(outcome(3, 4), outcome(3, 4)) is None
    assert apart(outcome(3, 4, 5), outcome(3, 6, 7)) == 4.25
    by_adapter = [outcome(1), outcome(2), outcome(1), outcome(3), outcome(1), outcome(2)]
    assert same_texts(by_adapter, 2) == 3 + 1


def test_an_answer_of_another_adapter_stands_out(stories_dir: Path, tmp_path: Path) -> None:
    """Of the same rank: weights alone tell them apart."""
    paths = make_adapters(stories_dir, tmp_path, [8, 8, 4], 5)
    engine = LocalEngine(stories_dir, tmp_path / "registry", dtype="float32", threads=1, adapter_memory=8 << 20)
    adapters = [engine.deploy(path) for path in paths]
    calls = [(adapter, prompt) for adapter in adapters for prompt in PROMPTS]
    alone, company = answers(engine, calls, together=False), answers(engine, calls, together=True)
    engine.close()
    references = PeftReference(stories_dir), PeftReference(stories_dir)
    for shift in (0, 1):
        errors = {name: Errors() for name in ("PEFT", "alone", "company")}
        for i, prompt in enumerate(PROMPTS * len(paths)):
            path = paths[(i // len(PROMPTS) + shift) % len(paths)]
            hold(errors, references, path, prompt, [("alone", alone[i]), ("company", company[i])])
        worst = {name: each.row(name)["most"] for name, each in errors.items()}
        assert worst["PEFT"] == 0
        assert all((worst[name] > 0.05) == bool(shift) for name in ("alone", "company")), worst
        assert shift or max(worst.values()) < 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quick_run(stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    file = tmp_path / "report.json"
    run_study(
        monkeypatch, "exactness.rounding", "--quick", "--model", str(stories_dir), "--dtype", dtype, "--json", str(file)
    )
    document = json.loads(file.read_text())
    assert [row["of"] for row in document["rows"]] == ["PEFT", "alone", "company"]
    assert document["settings"]["answers"] == 8
    assert document["figures"]["most_company"] < (0.75 if dtype == "bfloat16" else 1e-3)  # 0.54 without bf16 units
