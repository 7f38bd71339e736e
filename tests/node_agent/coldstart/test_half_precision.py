"""A node in fp16 whose CPU workers compute a cold call's adapter, against Hugging Face PEFT alone in fp16."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from node_agent.cores import spare_cores
from node_agent.types import Plan
from tests.node_agent.coldstart.held_link import HeldLink
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally, check
from tests.support.forced import force
from tests.support.local_engine import MakeEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, draw_adapter, make_adapter
from tests.support.random_model import HALF_TOLERANCE, write_half_llama

VOCAB = 97
PROMPT = [1, *range(20, 60)]
TIE = 2 * HALF_TOLERANCE
pytestmark = pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_half_llama(tmp_path_factory.mktemp("half") / "llama", VOCAB)


def test_workers_compute_a_whole_prompt(make_engine: MakeEngine, model_dir: Path, tmp_path: Path) -> None:
    """No byte of the adapter is on the device when its first token comes."""
    engine = make_engine(model_dir, dtype="float16", cpu_workers=1)
    layers = engine.base.num_layers
    starts = engine.engine.cold_start
    starts.plan = lambda lease, n_tokens, ahead: Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)  # type: ignore[method-assign, assignment]
    path = make_adapter(model_dir, tmp_path / "a", 3, torch.float16, r=7, lora_alpha=7, target_modules=ALL_TARGETS)
    link = HeldLink(engine)
    request = engine.submit(PROMPT, 8, engine.deploy(path), ignore_eos=True)
    outcome = engine.outcomes[request]
    engine.run(until=lambda: bool(outcome.tokens))
    link.open()
    engine.run()
    assert outcome.finished is not None and outcome.finished.cold_start.layers_cpu >= layers
    reference, tally = PeftReference(model_dir, torch.float16), Tally(tie=TIE)
    assert not check(engine, reference, Case(path, None, PROMPT, 8), outcome.tokens, tally)
    with_base = PeftReference(model_dir, torch.float16).greedy(None, PROMPT, 8)
    assert outcome.tokens != with_base.tokens, "the adapter changes the answer"


def test_drawn_plans_and_faults(make_engine: MakeEngine, model_dir: Path, tmp_path: Path) -> None:
    rng, tally, seen = random.Random(3), Tally(tie=TIE), Counter[str]()
    engine = make_engine(
        model_dir, dtype="float16", cpu_workers=1, adapter_memory=256 << 10, block_tokens=4, max_rows=16
    )
    forced = force(engine.engine, random.Random(4), faults=0.03)
    kinds = [Case(None, None, [], 0)]
    for i in range(6):
        path = make_adapter(model_dir, tmp_path / f"drawn{i}", i, torch.float16, **draw_adapter(rng, 2))
        kinds.append(Case(path, engine.deploy(path), [], 0))
    reference, problems = PeftReference(model_dir, torch.float16), list[str]()
    while tally.cases < 24 or not seen["layers_cpu"] or not seen["layers_device"]:
        problems += run_batch(rng, engine, reference, kinds, tally, seen)
        assert tally.cases < 1000, f"of the layers of all calls, workers and the device computed {seen}"
    assert not problems, "\n".join(problems)
    assert forced.plans["assist"]
