"""What is expected of an answer, by what is known."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.lengths import ResponseLengths


def test_the_function_then_its_tenant_then_everybody_then_half() -> None:
    lengths = ResponseLengths()
    assert (lengths.expected("t", "f", 200), lengths.typical()) == (100, 0)
    lengths.note("u", "g", 30)
    assert lengths.expected("t", "f", 200) == 30
    lengths.note("t", "g", 50)
    assert lengths.expected("t", "f", 200) == 50
    lengths.note("t", "f", 70)
    assert lengths.expected("t", "f", 200) == 70
    assert lengths.expected("t", "f", 8) == 8
    assert lengths.typical() == 50


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 1000))
def test_it_stays_between_the_shortest_and_the_longest(answers: list[int], max_tokens: int) -> None:
    lengths = ResponseLengths()
    for answer in answers:
        lengths.note("t", "f", answer)
    expected = lengths.expected("t", "f", max_tokens)
    assert 1 <= expected <= max_tokens
    assert max(1, min(min(answers), max_tokens)) - 1e-6 <= expected <= max(1, max(answers)) + 1e-6


@given(st.lists(st.integers(0, 1000), max_size=900), st.floats(1, 1000))
def test_the_mean_of_inverses_is_everybodys_scaled_to_what_is_expected(answers: list[int], expected: float) -> None:
    lengths = ResponseLengths()
    for index, answer in enumerate(answers):
        lengths.note("t", f"f{index % 7}", answer)
    tokens = [max(1, answer) for answer in answers] or [1]
    spread = mean(tokens) * mean(1 / count for count in tokens)
    assert spread >= 1.0 - 1e-9
    assert lengths.inverse(expected) == pytest.approx(min(1.0, max(1.0, spread) / expected))


def test_it_follows_a_change() -> None:
    lengths = ResponseLengths()
    for answer in [10] * 100 + [90] * 60:
        lengths.note("t", "f", answer)
    assert 80 < lengths.expected("t", "f", 1000) < 90


def test_what_was_called_least_recently_is_forgotten() -> None:
    lengths = ResponseLengths(max_functions=2, max_tenants=2)
    for tenant, function, tokens in [("t", "a", 10), ("t", "b", 20), ("t", "a", 10), ("u", "c", 30)]:
        lengths.note(tenant, function, tokens)
    assert lengths.expected("t", "a", 100) == 10
    assert lengths.expected("t", "b", 100) != 20
    assert lengths.expected("u", "c", 100) == 30
