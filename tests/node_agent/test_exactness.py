"""Greedy tokens in fp32 equal those of PEFT run alone, whatever shares the batch and in whatever order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.text import BaseText
from node_agent.api.detokenize import IncrementalDetokenizer, TokenText
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import TIE, PeftReference

POOL = 512 << 10
"""Bytes; the drawn adapters take 992 KiB together, the largest 304 KiB."""
PROMPTS = st.lists(st.integers(3, 511), min_size=0, max_size=70).map(lambda ids: [1, *ids])


def test_base_writes_the_known_story(make_engine: MakeEngine) -> None:
    """llama2.c's own expectation of 200 greedy steps from BOS, byte for byte."""
    engine = make_engine()
    request = engine.submit([1], 200, ignore_eos=True)
    engine.run()
    detokenizer = IncrementalDetokenizer(TokenText(BaseText(engine.model_dir)), [1])
    text = "".join(detokenizer.add(token) for token in engine.outcomes[request].tokens) + detokenizer.flush()
    expected = Path(__file__).parents[2] / "examples/models/stories260K/stories260K.greedy200.txt"
    assert text.encode() == expected.read_bytes()


def test_drawn_adapters_can_be_judged_by_tokens(
    stories_dir: Path, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """Rounding in fp32 stays below what the tie rule excuses, and an adapter that is left out is seen at once."""
    precise = PeftReference(stories_dir, torch.float64)
    rng = random.Random(1)
    prompts = [[1, *(rng.randrange(3, 512) for _ in range(length))] for length in (40, 120)]
    for path in drawn_adapters:
        found = [(reference.logits(path, ids), precise.logits(path, ids)) for ids in prompts]
        assert max(float((got - true).abs().max()) for got, true in found) < TIE, path
        base = torch.cat([reference.logits(None, ids) for ids in prompts]).argmax(1)
        changed = torch.cat([got for got, _ in found]).argmax(1) != base
        assert changed.float().mean() > 0.1, path


@pytest.fixture
def shared_engine(make_engine: MakeEngine, drawn_adapters: list[Path]) -> Iterator[tuple[LocalEngine, list[Case]]]:
    """A pool that holds about half of the adapters, so that eviction goes on all the time; some must have."""
    engine = make_engine(adapter_memory=POOL, chunk_tokens=24, max_rows=16, block_tokens=4)
    cases = [Case(directory, engine.deploy(directory), [], 0) for directory in drawn_adapters]
    yield engine, [Case(None, None, [], 0), *cases]
    assert engine.engine.store.room.eviction.evictions, "every adapter fits: the pool is too large for this test"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drawn_batches(
    data: st.DataObject, shared_engine: tuple[LocalEngine, list[Case]], reference: PeftReference
) -> None:
    """Mixed adapters, ranks and the base; arrivals between steps; cancellations at drawn times."""
    engine, choices = shared_engine
    jobs = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, len(choices) - 1),
                PROMPTS,
                st.integers(1, 20),  # tokens to generate
                st.integers(0, 4),  # steps before the next arrival
                st.one_of(st.none(), st.none(), st.integers(0, 12)),  # cancelled so many steps after its arrival
            ),
            min_size=1,
            max_size=16,
        )
    )
    engine.engine.limits = replace(engine.engine.limits, chunk_tokens=data.draw(st.integers(1, 40)))
    running: list[tuple[Case, str]] = []
    cancels: list[tuple[int, str]] = []
    steps = 0
    for choice, prompt, count, pause, cancel_after in jobs:
        kind = choices[choice]
        case = Case(kind.directory, kind.adapter, prompt, count)
        request = engine.submit(prompt, count, kind.adapter)
        if cancel_after is None:
            running.append((case, request))
        else:
            cancels.append((steps + cancel_after, request))
        for _ in range(pause):
            steps += 1
            engine.step()
            _cancel_due(engine, cancels, steps)
    while engine.engine.busy:
        steps += 1
        engine.step()
        _cancel_due(engine, cancels, steps)
    engine.assert_clean()
    tally = Tally()
    for case, request in running:
        assert engine.outcomes[request].finished is not None
        assert not check(engine, reference, case, engine.outcomes[request].tokens, tally)
    assert tally.mismatches == 0


def _cancel_due(engine: LocalEngine, cancels: list[tuple[int, str]], steps: int) -> None:
    for due, request in list(cancels):
        if steps >= due:
            engine.engine.cancel(request)
            cancels.remove((due, request))


def test_sixteen_at_once(shared_engine: tuple[LocalEngine, list[Case]], reference: PeftReference) -> None:
    engine, choices = shared_engine
    cases = [
        Case(kind.directory, kind.adapter, [1, *range(20 + i, 40 + 3 * i)], 24)
        for i, kind in enumerate((choices * 2)[:16])
    ]
    requests = [engine.submit(case.prompt, case.max_tokens, case.adapter) for case in cases]
    engine.run()
    tally = Tally()
    problems = [
        check(engine, reference, case, engine.outcomes[request].tokens, tally)
        for case, request in zip(cases, requests, strict=True)
    ]
    assert not any(problems), problems


def test_demo_adapters_of_stories(
    make_engine: MakeEngine, stories_adapters: dict[str, Path], reference: PeftReference
) -> None:
    engine = make_engine()
    kinds = [Case(path, engine.deploy(path), [], 0) for path in stories_adapters.values()]
    cases = [Case(kind.directory, kind.adapter, [1, 403, 407, 261], 60) for kind in [*kinds, Case(None, None, [], 0)]]
    requests = [engine.submit(case.prompt, case.max_tokens, case.adapter) for case in cases]
    engine.run()
    tally = Tally()
    for case, request in zip(cases, requests, strict=True):
        assert not check(engine, reference, case, engine.outcomes[request].tokens, tally)
    assert len({tuple(tokens) for tokens in engine.results(requests)}) == len(requests), "the adapters change nothing"
