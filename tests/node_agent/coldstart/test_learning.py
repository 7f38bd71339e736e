"""Corrections of forecasts: bounded, converging, and forgotten when nothing comes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.coldstart.learning import FADE_S, MAX_CORRECTION, MIN_CORRECTION, Correction, LearntLink
from node_agent.coldstart.profile import LinkCost

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
        assert MIN_CORRECTION * (1 - 1e-9) <= correction.value <= MAX_CORRECTION * (1 + 1e-9)


@given(RATIOS, st.floats(1e-3, 1e3), st.lists(RATIOS, max_size=5))
def test_it_comes_to_what_is_always_observed(ratio: float, forecast: float, before: list[float]) -> None:
    correction = Correction(Clock())
    for other in before:
        correction.learn(1.0, other)
    for _ in range(30):
        correction.learn(forecast, forecast * ratio)
    assert correction.value == pytest.approx(min(MAX_CORRECTION, max(MIN_CORRECTION, ratio)), rel=1e-3)


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


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_loads_of_one_size_change_the_rate(factor: float) -> None:
    profile = LinkCost(1e-3, 1e8)
    link = LearntLink(profile, Clock())
    for _ in range(12):
        link.learn(1 << 24, factor * (1e-3 + (1 << 24) / 1e8))
    assert link.cost.bandwidth == pytest.approx(1e8 / factor, rel=0.15)


def test_loads_of_several_sizes_tell_latency_from_bandwidth() -> None:
    link = LearntLink(LinkCost(0.0, 1e8), Clock())
    for _ in range(5):
        for size in (1 << 20, 1 << 23, 1 << 26):
            link.learn(size, 0.05 + size / 2e8)
    assert 0.015 < link.cost.latency < 0.055
    assert link.cost.bandwidth == pytest.approx(2e8, rel=0.3)


def test_what_loads_said_is_forgotten_in_time() -> None:
    clock = Clock()
    link = LearntLink(LinkCost(0.0, 1e8), clock)
    for _ in range(5):
        link.learn(1 << 24, 10 * (1 << 24) / 1e8)
    assert link.cost.bandwidth < 2e7
    clock.now += 20 * FADE_S
    assert link.cost.bandwidth == pytest.approx(1e8, rel=0.01)


@given(st.lists(st.tuples(st.integers(-5, 1 << 40), st.floats(allow_nan=True)), max_size=20))
def test_the_learnt_link_stays_within_bounds_whatever_is_observed(loads: list[tuple[int, float]]) -> None:
    link = LearntLink(LinkCost(1e-5, 1e9), Clock())
    for size, seconds in loads:
        link.learn(size, seconds)
    assert (
        1e9 / MAX_CORRECTION * 0.999 <= link.cost.bandwidth <= 1e9 / MIN_CORRECTION * 1.001 and link.cost.latency >= 0
    )
