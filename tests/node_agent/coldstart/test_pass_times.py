"""Forecasts corrected by measured passes: against passes made up by a known law."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.coldstart.pass_times import (
    ANY_SPREAD,
    MAX_KINDS,
    MAX_SAMPLES,
    MIN_SPREAD,
    ROUNDS,
    CallKind,
    PassSample,
    PassTimes,
    kind_of,
)
from tests.node_agent.adapter_world import World


def kind(rank: int, tokens: int) -> CallKind:
    return CallKind((0, 1, 2), rank, tokens)


def measured(fixed: float, slope: float, noise: float = 0.0, seed: int = 0) -> PassTimes:
    """Passes of 12 kinds that take fixed + slope * forecast seconds, but for a factor within 1 +- noise."""
    rng, times = random.Random(seed), PassTimes()
    for rank in (8, 32, 128):
        for tokens in (16, 64, 256, 512):
            forecast = 1e-4 * rank + 1e-3 * tokens
            for _ in range(ROUNDS):
                seconds = (fixed + slope * forecast) * (1 + rng.uniform(-noise, noise))
                times.add(PassSample(kind(rank, tokens), "assist", forecast, seconds))
    return times


@given(st.floats(0, 0.5), st.floats(0.2, 5))
def test_a_fixed_part_and_a_slope_are_found(fixed: float, slope: float) -> None:
    times = measured(fixed, slope)
    forecast = np.array([1e-3, 0.05, 0.7])
    _, likely, _ = times.bounds(kind(512, 1024), "assist", forecast)  # no such pass was measured
    np.testing.assert_allclose(likely, fixed + slope * forecast, rtol=0.02)


@given(st.floats(0, 0.2), st.integers(0, 99))
def test_the_bounds_of_a_kind_are_those_of_its_median(noise: float, seed: int) -> None:
    times = measured(0.02, 1.5, noise, seed)
    for kind_ in {sample.kind for sample in times.samples}:
        samples = times.of(kind_, "assist")
        low, likely, high = times.bounds(kind_, "assist", np.array([samples[0].forecast]))
        seconds = [sample.seconds for sample in samples]
        assert likely[0] == pytest.approx(np.median(seconds))
        notch = 1.57 * (np.quantile(seconds, 0.75) - np.quantile(seconds, 0.25)) / len(seconds) ** 0.5
        assert high[0] - likely[0] == pytest.approx(max(notch, MIN_SPREAD * likely[0]))
        assert likely[0] - low[0] == pytest.approx(high[0] - likely[0])


def test_one_slow_pass_among_many_leaves_the_bounds_close() -> None:
    times = PassTimes(
        [PassSample(kind(64, 64), "assist", 0.1, s) for s in (0.5, 0.51, 0.49, 0.5, 0.52, 0.5, 0.51, 1.5)]
    )
    _, likely, high = times.bounds(kind(64, 64), "assist", np.array([0.1]))
    assert likely[0] == pytest.approx(0.505) and high[0] < 0.53


def test_bursts_are_kept_apart() -> None:
    times = PassTimes([PassSample(kind(64, 64), "assist", 0.0, 0.5, 0.5, 1.0, 2)])
    assert not times.of(kind(64, 64), "assist") and len(times.burst(kind(64, 64), "assist")) == 1
    assert PassTimes(times.samples).burst(kind(64, 64), "assist") == times.burst(kind(64, 64), "assist")
    times.forget("assist")
    assert not times.samples


def test_what_deviates_from_the_fit_is_corrected_for_its_own_kind() -> None:
    times = measured(0.01, 1.0)
    odd = kind(64, 64)
    for _ in range(ROUNDS):
        times.add(PassSample(odd, "assist", 0.1, 0.33))
    assert times.bounds(odd, "assist", np.array([0.1]))[1][0] == pytest.approx(0.33)
    other = times.bounds(kind(32, 64), "assist", np.array([0.0672]))[1][0]
    assert other == pytest.approx(0.01 + 0.0672, rel=0.05)


def test_without_a_pass_of_the_kind_bounds_are_wide() -> None:
    low, likely, high = PassTimes().bounds(kind(64, 64), "pipeline", np.array([1.0, 2.0]))
    np.testing.assert_allclose(likely, [1.0, 2.0])
    np.testing.assert_allclose(low, (1 - ANY_SPREAD) * likely)
    np.testing.assert_allclose(high, (1 + ANY_SPREAD) * likely)


def test_a_wait_that_was_never_timed_is_corrected_as_the_pipeline_is() -> None:
    """Served calls that wait are not timed: their forecast alone must not look better than measured pipelines."""
    served = PassTimes([PassSample(kind(64, 64), "pipeline", 0.1, 0.15)])
    bounds = (served.bounds(kind(64, 64), plan, np.array([0.12])) for plan in ("wait", "pipeline"))
    for by_wait, by_pipeline in zip(*bounds, strict=True):
        assert by_wait[0] == by_pipeline[0]
    assert served.bounds(kind(64, 64), "wait", np.array([0.12]))[1][0] == pytest.approx(0.18)
    served.add(PassSample(kind(64, 64), "wait", 0.12, 0.14))
    assert served.bounds(kind(64, 64), "wait", np.array([0.12]))[1][0] == pytest.approx(0.14)


def test_a_kind_is_measured_once_enough_passes_of_each_plan_are_known() -> None:
    times, one = PassTimes(), kind(64, 64)
    for count in range(ROUNDS):
        assert not times.is_measured(one), count
        times.add(PassSample(one, "pipeline", 0.1, 0.2))
        times.add(PassSample(one, "assist", 0.1, 0.2))
    assert times.is_measured(one) and not times.is_measured(kind(64, 128))
    assert PassTimes(times.samples).is_measured(one), "samples that were kept say the same"
    times.forget("assist")
    assert not times.is_measured(one) and times.of(one, "pipeline")


def test_old_passes_give_way_to_new_ones() -> None:
    times, one = PassTimes(), kind(64, 64)
    for at in range(3 * MAX_SAMPLES):
        times.add(PassSample(one, "pipeline", 0.1, 0.1 if at < 2 * MAX_SAMPLES else 0.3))
    assert len(times.of(one, "pipeline")) == MAX_SAMPLES
    assert times.bounds(one, "pipeline", np.array([0.1]))[1][0] == pytest.approx(0.3)
    for tokens in range(2 * MAX_KINDS):
        times.add(PassSample(kind(8, tokens + 1), "pipeline", 0.1, 0.1))
    assert len({sample.kind for sample in times.samples}) == MAX_KINDS


@pytest.mark.parametrize(("forecast", "seconds"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_passes_that_say_nothing_are_ignored(forecast: float, seconds: float) -> None:
    times = PassTimes()
    times.add(PassSample(kind(8, 8), "wait", forecast, seconds))
    assert not times.samples


def test_kinds_are_told_apart_by_powers_of_two(world: World) -> None:
    pool = world.store().pool
    for rank, tokens, expected in ((64, 64, (64, 64)), (48, 90, (64, 64)), (5, 91, (4, 128)), (6, 1, (8, 1))):
        layout = pool.uniform_layout(world.base, rank, (0, 1, 2))
        assert kind_of(layout, tokens) == CallKind((0, 1, 2), *expected)


def test_a_forecast_far_beyond_measured_ones_has_wide_bounds() -> None:
    """As many calls at once have: a fit of single ones says little of them."""
    times = PassTimes([PassSample(kind(64, 64), "assist", 0.1, 0.2) for _ in range(ROUNDS)])
    low, likely, high = times.bounds(kind(64, 64), "assist", np.array([0.15, 0.3]))
    np.testing.assert_allclose(high / likely - 1, [MIN_SPREAD, ANY_SPREAD])
    np.testing.assert_allclose(1 - low / likely, [MIN_SPREAD, ANY_SPREAD])
