"""SmolLM2-135M-Instruct in fp32: every demo adapter in one mixed batch, drawn batches, and a long prompt."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.text import BaseText
from tests.support.draws import draws
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import PeftReference

TEXT = Path(__file__).parents[2] / "examples" / "adapters" / "text"


@pytest.fixture(scope="module")
def text(smollm_dir: Path) -> BaseText:
    return BaseText(smollm_dir)


@pytest.fixture(scope="module")
def smollm_reference(smollm_dir: Path) -> PeftReference:
    return PeftReference(smollm_dir)


@pytest.fixture(scope="module")
def served(
    smollm_dir: Path, smollm_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[LocalEngine, list[Case]]:
    engine = LocalEngine(smollm_dir, tmp_path_factory.mktemp("registry"), dtype="float32", kv_memory=512 << 20)
    kinds = [Case(path, engine.deploy(path), [], 0) for path in smollm_adapters.values()]
    return engine, [Case(None, None, [], 0), *kinds]


def seed_tasks() -> list[str]:
    """Instructions that people wrote (Alpaca's seed tasks)."""
    with gzip.open(TEXT / "alpaca_seed_tasks.jsonl.gz", "rt") as lines:
        return [json.loads(line)["instruction"] for line in lines]


def run_and_check(engine: LocalEngine, reference: PeftReference, cases: list[Case]) -> None:
    requests = [engine.submit(case.prompt, case.max_tokens, case.adapter) for case in cases]
    engine.run()
    engine.assert_clean()
    tally = Tally()
    problems = [
        check(engine, reference, case, engine.outcomes[request].tokens, tally)
        for case, request in zip(cases, requests, strict=True)
    ]
    assert not any(problems), problems


def test_every_demo_adapter_in_one_batch(
    served: tuple[LocalEngine, list[Case]], text: BaseText, smollm_reference: PeftReference
) -> None:
    engine, kinds = served
    prompts = [text.encode_chat([{"role": "user", "content": task}]) for task in seed_tasks()[: 2 * len(kinds)]]
    cases = [Case(k.directory, k.adapter, prompt, 10) for k, prompt in zip(kinds * 2, prompts, strict=True)]
    run_and_check(engine, smollm_reference, cases)


@settings(max_examples=draws(3), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drawn_batches(
    data: st.DataObject,
    served: tuple[LocalEngine, list[Case]],
    text: BaseText,
    smollm_reference: PeftReference,
) -> None:
    engine, kinds = served
    tasks = seed_tasks()
    jobs = data.draw(
        st.lists(st.tuples(st.integers(0, len(kinds) - 1), st.integers(0, len(tasks) - 1)), min_size=1, max_size=6)
    )
    cases = [
        Case(kinds[k].directory, kinds[k].adapter, text.encode_prompt(tasks[t])[:120], 1 + (k + t) % 8) for k, t in jobs
    ]
    run_and_check(engine, smollm_reference, cases)


@pytest.mark.parametrize("tokens", [1200, pytest.param(8000, marks=pytest.mark.slow)])
def test_a_long_meeting(
    tokens: int, served: tuple[LocalEngine, list[Case]], text: BaseText, smollm_reference: PeftReference
) -> None:
    """Prefilled in chunks beside a short request that goes on decoding meanwhile."""
    engine, kinds = served
    with gzip.open(Path(__file__).parents[1] / "data" / "qmsum" / "meeting.txt.gz", "rt") as meeting:
        prompt = text.encode_prompt(meeting.read())[:tokens]
    assert len(prompt) == tokens
    long = Case(kinds[1].directory, kinds[1].adapter, prompt, 4)
    short = Case(None, None, text.encode_prompt("The capital of France is"), 12)
    run_and_check(engine, smollm_reference, [long, short])
