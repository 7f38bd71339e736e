"""Each rule alone and all together, against transformers' own logits processors over drawn scores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Sampling
from node_agent.runner.sampler import sample
from node_agent.runner.score_rules import ScoreRules, changes_scores
from node_agent.types import SamplingBatch
from tests.node_agent.score_reference import by_transformers

VOCAB = 12
TOKEN = st.integers(0, VOCAB - 1)
TOKENS = st.lists(TOKEN, max_size=8)
SCORES = st.lists(st.floats(-4, 4, width=32), min_size=VOCAB, max_size=VOCAB)
CPU = torch.device("cpu")


def changed(way: Sampling, scores: list[float], prompt: list[int], output: list[int], eos: list[int]) -> torch.Tensor:
    rules = ScoreRules(way, prompt, 64, eos, CPU)
    for token in output:
        rules.append_token(token)
    row = torch.tensor(scores)
    rules.apply(row)
    return row


WAYS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.25]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(TOKEN, st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=4),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(TOKEN, max_size=2),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=3), max_size=4, unique_by=tuple),
)


@given(
    way=WAYS,
    scores=SCORES,
    prompt=st.lists(TOKEN, min_size=1, max_size=8),
    output=TOKENS,
    eos=st.lists(TOKEN, max_size=2),
)
def test_scores_are_those_of_transformers(
    way: Sampling, scores: list[float], prompt: list[int], output: list[int], eos: list[int]
) -> None:
    want = by_transformers(way, torch.tensor(scores), prompt, output, eos)
    torch.testing.assert_close(changed(way, scores, prompt, output, eos), want, atol=1e-5, rtol=1e-5)


@given(way=WAYS, prompt=st.lists(TOKEN, min_size=1), output=TOKENS)
def test_parameters_that_ask_for_nothing_need_no_rules(way: Sampling, prompt: list[int], output: list[int]) -> None:
    scores = [0.5 - token for token in range(VOCAB)]
    if not changes_scores(way):
        assert changed(way, scores, prompt, output, [2]).tolist() == scores


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-6])
def test_the_least_repetition_penalty_chooses_what_the_prompt_has(penalty: float) -> None:
    """Its scores leave the range of fp32: an infinite one would make every probability NaN."""
    way = Sampling(repetition_penalty=penalty)
    row = torch.tensor([[5.0, 1.0, 0.5, -4.0]])
    rules = ScoreRules(way, [1, 3], 5, [0], CPU)
    batch = SamplingBatch([1e-4], [1.0], [0], [0.0], [0.999], [-1], {0: rules})
    assert sample(row, batch)[0].tolist() == [1]
