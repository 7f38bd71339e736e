"""Parameters of vLLM's in mixed batches: every token and log probability is held against PEFT's own logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from cluster.messages import Adapter, Sampling
from node_agent.runner.sampler import uniform
from tests.node_agent.score_reference import by_transformers, interval
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import TIE, PeftReference

STORY = [1, 403, 407, 261, 378, 300, 415, 266]
LENGTH = 24

Mixed = tuple[LocalEngine, list[tuple[Path | None, Adapter | None]]]
"""An engine, and the functions that it serves; the first is the base."""


@dataclass(frozen=True)
class Asked:
    """One request, and the adapter's folder (None: the base)."""

    id: str
    way: Sampling
    prompt: list[int]
    directory: Path | None
    ignore_eos: bool = False


def usual(engine: LocalEngine) -> list[int]:
    """What the base writes without any parameter."""
    request = engine.submit(STORY, LENGTH)
    engine.run()
    return engine.outcomes[request].tokens


def ways(plain: list[int]) -> list[Sampling]:
    """Each parameter alone, then together; greedy and drawn. They ask for what changes `plain`."""
    first, pair = plain[0], plain[3:5]
    return [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, repetition_penalty=1.4),
        Sampling(temperature=0.0, logit_bias={first: -100.0, plain[2]: 3.5, 7: 2.0}),
        Sampling(temperature=0.0, min_tokens=12, stop_token_ids=[plain[1], plain[2]]),
        Sampling(temperature=0.0, bad_words=[[first], pair, plain[6:9]]),
        Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.5),
        Sampling(temperature=0.8, seed=5, repetition_penalty=0.8, logit_bias={first: 2.0}, top_k=40),
        Sampling(temperature=1.2, seed=6, choice=3, min_tokens=8, bad_words=[pair], repetition_penalty=1.2),
        Sampling(
            temperature=0.0, logprobs=2, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={plain[1]: -5.0}
        ),
        Sampling(temperature=0.0, allowed_token_ids=plain[1:9]),
        Sampling(temperature=1.1, seed=7, allowed_token_ids=[*plain[:4], 2, 300, 511], bad_words=[[300]], top_k=5),
    ]


def assert_follows(engine: LocalEngine, reference: PeftReference, asked: Asked) -> None:
    """Teacher-forced: at each place the token is the one that the reference's scores lead to."""
    outcome, way = engine.outcomes[asked.id], asked.way
    tokens = outcome.tokens
    raw = reference.logits(asked.directory, asked.prompt + tokens[:-1], last=len(tokens))
    for place, token in enumerate(tokens):
        before = tokens[:place]
        scores = by_transformers(way, raw[place], asked.prompt, before, engine.engine.eos_ids)
        if way.temperature == 0:
            assert float(scores.max() - scores[token]) < TIE, (way, place)
            continue
        low, high = interval(way, scores, token)
        u = uniform(way.seed, way.choice, len(asked.prompt) + place)
        assert low - 1e-3 <= u <= high + 1e-3, (way, place)
    assert not way.allowed_token_ids or set(tokens) <= set(way.allowed_token_ids)
    ends = [*way.stop_token_ids, *([] if asked.ignore_eos else engine.engine.eos_ids)]
    assert not set(tokens[: max(way.min_tokens, 0)]) & set(ends)
    assert not set(tokens[:-1]) & set(ends)
    assert outcome.finished is not None
    assert outcome.finished.reason == ("stop" if tokens[-1] in ends else "length")


@pytest.fixture
def mixed(make_engine: MakeEngine, drawn_adapters: list[Path]) -> Mixed:
    engine = make_engine(chunk_tokens=24, max_rows=12, block_tokens=4)
    adapted = [(path, engine.deploy(path)) for path in drawn_adapters[:3]]
    return engine, [(None, None), *adapted]


def test_every_parameter_in_mixed_batches(mixed: Mixed, reference: PeftReference) -> None:
    engine, functions = mixed
    plain = usual(engine)
    asked = []
    for number, way in enumerate(ways(plain)):
        for directory, adapter in (functions[0], functions[1 + number % 3]):
            ignore = number % 2 == 0
            id = engine.submit(STORY, LENGTH, adapter, way, ignore_eos=ignore)
            asked.append(Asked(id, way, STORY, directory, ignore))
    engine.run()
    assert engine.outcomes[asked[0].id].tokens[: len(plain)] == plain, "a neighbour's parameters have changed it"
    for request in asked:
        assert_follows(engine, reference, request)
    changed = [engine.outcomes[request.id].tokens[: len(plain)] != plain for request in asked[2::2]]
    assert all(changed), "a parameter was ignored"


def test_a_preempted_request_goes_on_with_its_penalties(make_engine: MakeEngine, reference: PeftReference) -> None:
    engine = make_engine(max_rows=1)
    way = Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.3, prompt_logprobs=1)
    early = engine.submit(STORY, LENGTH, sampling=way, slo_class="best_effort", ignore_eos=True)
    while len(engine.outcomes[early].tokens) < 4:
        engine.step()
    engine.submit(STORY, 2, slo_class="strict")
    engine.run()
    finished = engine.outcomes[early].finished
    assert finished is not None
    assert finished.preemptions == 1
    assert len(engine.outcomes[early].prompt_scores) == len(STORY) - 1
    assert_follows(engine, reference, Asked(early, way, STORY, None, ignore_eos=True))


def test_prompts_are_scored_in_chunks_beside_others(mixed: Mixed, reference: PeftReference) -> None:
    """Prompts longer than a chunk, of adapters that are cold when they come, and of one token."""
    engine, functions = mixed
    prompts = [[1, *((7 * place + 11 * size) % 500 + 5 for place in range(size))] for size in (0, 1, 23, 24, 70)]
    asked = []
    for prompt in prompts:
        for number, (directory, adapter) in enumerate(functions):
            way = Sampling(temperature=0.0, prompt_logprobs=number)
            asked.append(Asked(engine.submit(prompt, 3, adapter, way), way, prompt, directory))
            engine.submit(prompt, 3, adapter)
    engine.run()
    for request in asked:
        scores = engine.outcomes[request.id].prompt_scores
        assert len(scores) == len(request.prompt) - 1
        if not scores:
            continue
        logits = reference.logits(request.directory, request.prompt[:-1], last=len(scores))
        want = torch.log_softmax(logits, dim=-1)
        for score, row, token in zip(scores, want, request.prompt[1:], strict=True):
            assert abs(score.logprob - float(row[token])) < 1e-3
            near = (int((row > row[token] + TIE).sum()) + 1, int((row >= row[token] - TIE).sum()))
            assert near[0] <= score.rank <= near[1]
            assert len(score.top) == request.way.prompt_logprobs
            best = row.topk(len(score.top)).values.tolist()
            assert all(abs(got - value) < 1e-3 for (_, got), value in zip(score.top, best, strict=True))
            assert all(abs(float(row[other]) - got) < 1e-3 for other, got in score.top)
