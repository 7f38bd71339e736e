"""How far two results of the check at start are apart."""

from __future__ import annotations

import math

import pytest

from node_agent.vllm.self_check import UNLIKE, Scores, difference

FIRST: Scores = [(5, {5: -0.1, 6: -2.0}), (7, {7: -0.5, 8: -0.6})]


def test_the_largest_shift_counts() -> None:
    assert difference(FIRST, FIRST) == 0
    assert difference(FIRST, [(5, {5: -0.1, 6: -2.0}), (7, {7: -0.5, 8: -0.9})]) == pytest.approx(0.3)


def test_tokens_after_a_tie_do_not_count() -> None:
    tied: Scores = [(5, {5: -0.1, 6: -2.0}), (8, {7: -0.56, 8: -0.55}), (9, {9: 0.0})]
    assert difference([*FIRST, (4, {4: 0.0})], tied) == pytest.approx(0.06)


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_what_is_no_number_is_unlike(score: float) -> None:
    assert difference(FIRST, [(5, {5: score, 6: -2.0})]) == UNLIKE


def test_tokens_that_were_unlikely_are_unlike() -> None:
    assert difference(FIRST, [(9, {9: -0.1, 5: -2.0})]) == UNLIKE
