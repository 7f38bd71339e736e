"""What is expected of an answer, by what is known."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.lengths import MEMORY, SPREAD_MEMORY, ResponseLengths


def test_the_function_then_its_tenant_then_everybody_then_half() -> None:
    lengths = ResponseLengths()
    assert (lengths.expected("t", "f", 200), lengths.typical()) == (100, 0)
    lengths.record("u", "g", 30)
    assert lengths.expected("t", "f", 200) == 30
    lengths.record("t", "g", 50)
    assert lengths.expected("t", "f", 200) == 50
    lengths.record("t", "f", 70)
    assert lengths.expected("t", "f", 200) == 70
    assert lengths.expected("t", "f", 8) == 8
    assert lengths.typical() == 50


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 1000))
def test_it_stays_between_the_shortest_and_the_longest(answers: list[int], max_tokens: int) -> None:
    lengths = ResponseLengths()
    for answer in answers:
        lengths.record("t", "f", answer)
    expected = lengths.expected("t", "f", max_tokens)
    assert 1 <= expected <= max_tokens
    assert max(1, min(min(answers), max_tokens)) - 1e-6 <= expected <= max(1, max(answers)) + 1e-6


@given(st.lists(st.integers(0, 1000), max_size=900), st.floats(1, 1000))
def test_the_mean_of_inverses_is_everybodys_scaled_to_what_is_expected(answers: list[int], expected: float) -> None:
    lengths = ResponseLengths()
    for index, answer in enumerate(answers):
        lengths.record("t", f"f{index % 7}", answer)
    tokens = [max(1, answer) for answer in answers] or [1]
    spread = mean(tokens) * mean(1 / count for count in tokens)
    assert spread >= 1.0 - 1e-9
    assert lengths.inverse(expected) == pytest.approx(min(1.0, max(1.0, spread) / expected))


def test_it_follows_a_change() -> None:
    lengths = ResponseLengths()
    for answer in [10] * 100 + [90] * 60:
        lengths.record("t", "f", answer)
    assert 80 < lengths.expected("t", "f", 1000) < 90


def test_what_was_called_least_recently_is_forgotten() -> None:
    lengths = ResponseLengths(max_functions=2, max_tenants=2)
    for tenant, function, tokens in [("t", "a", 10), ("t", "b", 20), ("t", "a", 10), ("u", "c", 30)]:
        lengths.record(tenant, function, tokens)
    assert lengths.expected("t", "a", 100) == 10
    assert lengths.expected("t", "b", 100) != 20
    assert lengths.expected("u", "c", 100) == 30


TOKENS = st.sampled_from([0, 1, 2, 1_000_000, 10**9]) | st.integers(0, 3000)
WHOSE = st.sampled_from([("t", "a"), ("t", "b"), ("u", "a"), ("u", "c")])


def looked_back(values: list[float], memory: int) -> float:
    """The first `memory` count equally, and each later one takes that part of the mean from all before it."""
    first, rest = values[:memory], values[memory:]
    found = mean(first)
    for value in rest:
        found = found * (1 - 1 / memory) + value / memory
    return found


@given(st.lists(st.tuples(WHOSE, TOKENS), max_size=80), WHOSE | st.just(("v", "a")), st.integers(1, 10**9))
def test_each_mean_is_of_the_latest_answers(
    answers: list[tuple[tuple[str, str], int]], whose: tuple[str, str], max_tokens: int
) -> None:
    lengths = ResponseLengths()
    for (tenant, function), tokens in answers:
        lengths.record(tenant, function, tokens)
    everybody = [float(tokens) for _, tokens in answers]
    tenants = [float(tokens) for (tenant, _), tokens in answers if tenant == whose[0]]
    own = [float(tokens) for name, tokens in answers if name == whose]
    nearest = own or tenants or everybody
    known = looked_back(nearest, MEMORY) if nearest else max_tokens / 2
    expected = lengths.expected(*whose, max_tokens)
    assert expected == pytest.approx(min(max(known, 1.0), max_tokens))
    assert lengths.typical() == pytest.approx(looked_back(everybody, MEMORY) if everybody else 0.0)
    assert (1 - 1e-9) / expected <= lengths.inverse(expected) <= 1.0


@pytest.mark.parametrize("answers", [[3, 300] * 900, [1] * 999 + [10**6], [1000] * 1000 + [1] * 500, [5] * 3000])
def test_the_spread_is_of_the_latest_thousand(answers: list[int]) -> None:
    lengths = ResponseLengths()
    for tokens in answers:
        lengths.record("t", "f", tokens)
    spread = looked_back([float(tokens) for tokens in answers], SPREAD_MEMORY)
    spread *= looked_back([1 / tokens for tokens in answers], SPREAD_MEMORY)
    assert SPREAD_MEMORY == 1000
    for expected in (1.0, 50.0, 1e6):
        assert lengths.inverse(expected) == pytest.approx(min(1.0, max(1.0, spread) / expected))


def test_tenants_are_bounded_like_functions_and_asking_keeps_nobody() -> None:
    lengths = ResponseLengths(max_functions=3, max_tenants=2)
    for tenant, tokens in [("t", 10), ("u", 20), ("v", 30), ("w", 40)]:
        lengths.record(tenant, "f", tokens)
        assert lengths.expected("t", "f", 100) == (25 if tenant == "w" else 10)
    everybody = lengths.typical()
    assert [lengths.expected(tenant, "new", 100) for tenant in "tuvw"] == [everybody, everybody, 30, 40]
