"""Sampling against its definition, computed another way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Sampling
from node_agent.runner.sampler import sample, uniform
from node_agent.runner.score_rules import ScoreRules
from node_agent.types import SamplingBatch

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30)


def batch(**ways: object) -> SamplingBatch:
    defaults: dict[str, object] = {
        "temperature": [1.0], "top_p": [1.0], "top_k": [0], "min_p": [0.0], "uniform": [0.5],
        "logprobs": [-1],
    }  # fmt: skip
    return SamplingBatch(**{**defaults, **ways})  # type: ignore[arg-type]


def allowed(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Token -> probability by the book: sort, cut to k, cut to the nucleus, drop what is below min_p of the best."""
    peak = max(logits)
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        ranked = ranked[:top_k]
    weights = {i: math.exp((logits[i] - peak) / temperature) for i in ranked}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    mass = 0.0
    for i in ranked:
        if mass / total >= top_p:
            break
        mass += weights[i]
        kept[i] = weights[i]
    best = max(kept.values())
    return {i: w for i, w in kept.items() if w >= min_p * best}


@given(
    logits=LOGITS,
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 10),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_the_inverse_transform(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    ways = batch(temperature=[temperature], top_k=[top_k], top_p=[top_p], min_p=[min_p], uniform=[u])
    token = int(sample(torch.tensor([logits]), ways)[0][0])
    kept = allowed(logits, temperature, top_k, top_p, min_p)
    slack = 1e-5  # fp32 scores may move a border by a little
    loose = allowed(logits, temperature, top_k, min(1.0, top_p + slack), max(0.0, min_p - slack))
    ties = {i for i in range(len(logits)) if any(abs(logits[i] - logits[j]) < 1e-6 for j in loose)}
    assert token in set(loose) | ties
    total = sum(kept.values())
    at = 0.0
    for i, weight in kept.items():
        at += weight / total
        if u < at - slack:
            assert logits[token] >= logits[i] - 1e-6, "a token behind the one that u falls on was drawn"
            break


def test_greedy_takes_the_best_and_ignores_the_filters() -> None:
    assert int(sample(torch.tensor([[1.0, 3.0, 2.0]]), batch(temperature=[0.0], top_p=[0.01]))[0][0]) == 1


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-37, 1e-38, 1e-46])
def test_the_coldest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.tensor([[-30.0, 80.0, 79.0, -80.0]])
    assert int(sample(logits, batch(temperature=[temperature], uniform=[0.999999]))[0][0]) == 1


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    counts = [0, 0, 0]
    for position in range(4000):
        counts[int(sample(logits, batch(uniform=[uniform(7, 0, position)]))[0][0])] += 1
    want = torch.softmax(logits[0], 0)
    assert all(abs(count / 4000 - float(p)) < 0.03 for count, p in zip(counts, want, strict=True))


@given(seed=st.integers(0, 2**63 - 1), choice=st.integers(0, 8), position=st.integers(0, 100_000))
def test_uniform_depends_on_its_arguments_alone(seed: int, choice: int, position: int) -> None:
    u = uniform(seed, choice, position)
    assert 0 <= u < 1
    assert u == uniform(seed, choice, position)
    assert u != uniform(seed, choice, position + 1)
    assert u != uniform(seed, choice + 1, position)


def test_penalties_are_openais() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    for frequency, want in ((0.01, 0), (0.03, 1)):  # 2.0 - 0.05 - 0.03 = 1.92, and 2.0 - 0.05 - 0.09 = 1.86
        way = Sampling(presence_penalty=0.05, frequency_penalty=frequency)
        rules = ScoreRules(way, [1], 4, [], logits.device)
        for _ in range(3):
            rules.append_token(0)
        assert int(sample(logits, batch(temperature=[0.0], rules={0: rules}))[0][0]) == want


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.tensor([[0.5, 2.5, -1.0, 2.0]])
    _, found = sample(logits, batch(temperature=[0.0], logprobs=[2]))
    want = torch.log_softmax(logits[0], 0)
    assert found[0] is not None
    chosen, top = found[0]
    assert abs(chosen - float(want[1])) < 1e-6
    assert [token for token, _ in top] == [1, 3]
    assert all(abs(value - float(want[token])) < 1e-6 for token, value in top)
    assert sample(logits, batch(temperature=[0.0], logprobs=[0]))[1][0] == (chosen, [])
