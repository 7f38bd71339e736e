"""The batched sampler gives what the one that goes row by row does, for drawn rows of drawn requests."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.messages import Sampling
from node_agent.api.request import LOGPROBS_LIMIT
from node_agent.runner.cuda_blocks import MAX_LOGPROBS, OutFields, StepFields, out_spec, size_of, step_spec, views
from node_agent.runner.cuda_pass import CudaOutput, send_changes, wants_everything
from node_agent.runner.cuda_sampler import (
    ROWS_DRAWN_AT_ONCE,
    pack_scores,
    sample,
    score_spec,
    unpack_scores,
)
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.prompt_scores import score_prompts
from node_agent.runner.sampler import sample as sample_by_row
from node_agent.runner.score_rules import ScoreRules, changes_scores
from node_agent.types import PromptScoring, SamplingBatch
from tests.support.draws import draws

STREAM = Stream()


def block(spec) -> dict[str, torch.Tensor]:
    """Memory as it was found: what is not written shows."""
    memory = STREAM.empty(size_of(spec)).fill_(0x7F)
    return views(spec, memory)


def drawn_batch(rng: random.Random, rows: int, vocab: int) -> SamplingBatch:
    rules = {}
    for row in range(rows):
        way = Sampling(
            presence_penalty=rng.choice([0.0, 0.7, -1.0]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
            logit_bias={token: rng.uniform(-3, 3) for token in rng.sample(range(vocab), rng.randrange(3))},
            min_tokens=rng.choice([0, 4]),
            stop_token_ids=[rng.randrange(vocab)],
            bad_words=[[rng.randrange(vocab) for _ in range(rng.randint(1, 2))] for _ in range(rng.randrange(4))],
        )
        if not changes_scores(way) or rng.random() < 0.3:
            continue
        prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 9))]
        rules[row] = ScoreRules(way, prompt, 8, [2], torch.device("cpu"))
        for _ in range(rng.randrange(6)):
            rules[row].append_token(rng.randrange(vocab))

    def each(choices: list) -> list:
        return [rng.choice(choices) for _ in range(rows)]

    return SamplingBatch(
        temperature=each([0.0, 1e-6, 0.5, 1.0, 2.5]),
        top_p=each([1.0, 0.9, 0.3]),
        top_k=each([0, 1, 3, vocab, 10 * vocab]),
        min_p=each([0.0, 0.05, 0.6]),
        uniform=[rng.random() for _ in range(rows)],
        logprobs=each([-1, -1, 0, 5]),
        rules=rules,
    )


def sampled(logits: torch.Tensor, batch: SamplingBatch) -> CudaOutput:
    rows, vocab = logits.shape
    fields = StepFields(**block(step_spec(rows, rows, 1)))
    for name in ("temperature", "top_p", "top_k", "min_p", "uniform"):
        getattr(fields, name).copy_(torch.tensor(getattr(batch, name)))
    out = OutFields(**block(out_spec(rows, vocab)))
    sample(logits, fields, send_changes(STREAM, batch, vocab), out, wants_everything(batch))
    return CudaOutput(STREAM.event(), out, batch.logprobs, list)


@settings(max_examples=draws(60))
@given(seed=st.integers(0, 2**32), rows=st.integers(1, ROWS_DRAWN_AT_ONCE + 3), vocab=st.integers(6, 40))
def test_every_row_is_as_if_it_were_alone(seed: int, rows: int, vocab: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab, generator=generator)
    batch = drawn_batch(rng, rows, vocab)
    tokens, logprobs = sample_by_row(logits, batch)
    got = sampled(logits, batch)
    assert got.token_ids.tolist() == tokens.tolist()
    assert not got.non_finite
    for mine, wanted in zip(got.logprobs, logprobs, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None and wanted is not None:
            assert [token for token, _ in mine[1]] == [token for token, _ in wanted[1]]
            values = [mine[0], *(value for _, value in mine[1])], [wanted[0], *(value for _, value in wanted[1])]
            torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]))


def test_rows_that_are_not_finite_are_told_and_disturb_no_other() -> None:
    """Also where nothing of a row may be drawn."""
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(5, 1)
    logits[1, 2], logits[2, 0], logits[3] = float("nan"), float("inf"), float("-inf")
    for temperature in (0.0, 1.0):
        got = sampled(logits, SamplingBatch([temperature] * 5, [1.0] * 5, [2] * 5, [0.1] * 5, [0.5] * 5, [-1] * 5))
        assert got.non_finite == {1, 2, 3}
        assert got.token_ids[[0, 4]].tolist() == [2, 2]
        assert set(got.token_ids.tolist()) <= {0, 1, 2}


def test_a_greedy_batch_brings_back_tokens_alone() -> None:
    batch = SamplingBatch([0.0, 0.0], [1.0] * 2, [0] * 2, [0.0] * 2, [0.5] * 2, [-1, -1])
    assert not wants_everything(batch)
    assert sampled(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), batch).token_ids.tolist() == [1, 0]


def test_as_many_log_probabilities_as_a_node_takes() -> None:
    assert MAX_LOGPROBS == LOGPROBS_LIMIT


@settings(max_examples=draws(10))
@given(seed=st.integers(0, 2**32), scored=st.integers(1, 70))
def test_prompt_scores_are_those_of_the_other_runners(seed: int, scored: int) -> None:
    rng = random.Random(seed)
    logits = torch.randn(90, 31, generator=torch.Generator().manual_seed(seed))
    rows = torch.tensor([rng.randrange(90) for _ in range(scored)])
    targets = torch.tensor([rng.randrange(31) for _ in range(scored)])
    top = [rng.choice([0, 1, 5, 64]) for _ in range(scored)]
    fields = StepFields(**block(step_spec(90, 1, 1, scored)))
    fields.score_rows.copy_(rows)
    fields.score_targets.copy_(targets)
    packed = block(score_spec(scored, max(top), 31))["packed"]
    pack_scores(lambda wanted: logits[wanted], fields, packed)
    assert unpack_scores(packed, top) == score_prompts(lambda wanted: logits[wanted], PromptScoring(rows, targets, top))
