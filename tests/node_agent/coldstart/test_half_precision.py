"""A node in fp16 whose CPU workers compute a cold call's adapter, against Hugging Face PEFT alone in fp16."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from node_agent.cores import spare_cores
from node_agent.types import Plan
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.coldstart.kept import as_started
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally, check
from tests.support.forced import force
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, draw_adapter, make_adapter
from tests.support.random_model import HALF_TOLERANCE, write_half_llama

VOCAB = 97
PROMPT = [1, *range(20, 60)]
TIE = 2 * HALF_TOLERANCE
pytestmark = pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_half_llama(tmp_path_factory.mktemp("half") / "llama", VOCAB)


@pytest.fixture(scope="module")
def half_reference(model_dir: Path) -> PeftReference:
    return PeftReference(model_dir, torch.float16)


@pytest.fixture(scope="module")
def kept(model_dir: Path, soon_again: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    engine = LocalEngine(
        model_dir, tmp_path_factory.mktemp("half") / "registry", prefix_cache="auto", dtype="float16", threads=1,
        adapter_memory=256 << 10, host_memory=32 << 20, kv_memory=32 << 20, cpu_workers=1, block_tokens=4, max_rows=16,
    )  # fmt: skip
    with closing(engine):
        yield engine


@pytest.fixture
def engine(kept: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    with as_started(kept, monkeypatch):
        yield kept


def test_workers_compute_a_whole_prompt(
    engine: LocalEngine,
    half_reference: PeftReference,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No byte of the adapter is on the device when its first token comes."""
    layers = engine.base.num_layers
    plan = Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    monkeypatch.setattr(engine.engine.cold_start, "plan", lambda lease, n_tokens, ahead: plan)
    path = make_adapter(model_dir, tmp_path / "a", 3, torch.float16, r=7, lora_alpha=7, target_modules=ALL_TARGETS)
    link = HeldLink(engine)
    request = engine.submit(PROMPT, 8, engine.deploy(path), ignore_eos=True)
    outcome = engine.outcomes[request]
    engine.run(until=lambda: bool(outcome.tokens))
    link.open()
    engine.run()
    assert outcome.finished is not None and outcome.finished.cold_start.layers_cpu >= layers
    assert not check(engine, half_reference, Case(path, None, PROMPT, 8), outcome.tokens, Tally(tie=TIE))
    with_base = half_reference.greedy(None, PROMPT, 8)
    assert outcome.tokens != with_base.tokens, "the adapter changes the answer"


def test_drawn_plans_and_faults(
    engine: LocalEngine,
    half_reference: PeftReference,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, tally, seen = random.Random(3), Tally(tie=TIE), Counter[str]()
    monkeypatch.setattr(engine.engine.cold, "cold_start", engine.engine.cold_start)  # what is forced ends with the test
    forced = force(engine.engine, random.Random(4), faults=0.03)
    kinds = [Case(None, None, [], 0)]
    for i in range(6):
        path = make_adapter(model_dir, tmp_path / f"drawn{i}", i, torch.float16, **draw_adapter(rng, 2))
        kinds.append(Case(path, engine.deploy(path), [], 0))
    problems: list[str] = []
    while tally.cases < 24 or not seen["layers_cpu"] or not seen["layers_device"]:
        problems += run_batch(rng, engine, half_reference, kinds, tally, seen)
        assert tally.cases < 1000, f"of the layers of all calls, workers and the device computed {seen}"
    assert not problems, "\n".join(problems)
    assert forced.plans["assist"]
