"""Corrections of forecasts: bounded, converging, and forgotten when nothing comes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.coldstart.learning import FADE_S, LEAST, MOST, Correction

RATIOS = st.floats(1e-6, 1e6)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.booleans(), st.floats(0, 60)), max_size=30))
def test_it_never_leaves_its_bounds(seen: list[tuple[float, float, bool, float]]) -> None:
    clock = Clock()
    correction = Correction(clock)
    for forecast, observed, at_most, later in seen:
        correction.learn(forecast, observed, at_most)
        clock.now += later
        assert LEAST * (1 - 1e-9) <= correction.value <= MOST * (1 + 1e-9)


@given(RATIOS, st.floats(1e-3, 1e3), st.lists(RATIOS, max_size=5))
def test_it_comes_to_what_is_always_observed(ratio: float, forecast: float, before: list[float]) -> None:
    correction = Correction(Clock())
    for other in before:
        correction.learn(1.0, other)
    for _ in range(30):
        correction.learn(forecast, forecast * ratio)
    assert correction.value == pytest.approx(min(MOST, max(LEAST, ratio)), rel=1e-3)


@given(st.lists(RATIOS, max_size=5), RATIOS)
def test_an_upper_bound_never_raises_it(before: list[float], bound: float) -> None:
    correction = Correction(Clock())
    for ratio in before:
        correction.learn(1.0, ratio)
    value = correction.value
    correction.learn(1.0, bound, at_most=True)
    assert correction.value <= value * (1 + 1e-9)
    if bound >= value:
        assert correction.value == pytest.approx(value)


@given(st.floats(0.3, 15))
def test_half_of_it_is_forgotten_in_time(ratio: float) -> None:
    clock = Clock()
    correction = Correction(clock)
    correction.learn(1.0, ratio)
    value = correction.value
    clock.now += FADE_S
    assert math.log(correction.value) == pytest.approx(math.log(value) / 2, abs=1e-9)
    clock.now += 40 * FADE_S
    assert correction.value == pytest.approx(1.0)


def test_a_forecast_of_nothing_teaches_nothing() -> None:
    correction = Correction(Clock())
    correction.learn(0.0, 1.0)
    correction.learn(math.nan, 1.0)
    correction.learn(1.0, math.nan)
    assert correction.value == 1.0
