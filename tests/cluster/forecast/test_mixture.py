"""Calibration, outcomes and weights against their definitions."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.forecast.calibration import (
    BINS,
    ERROR_FADING,
    FARTHEST,
    PRIOR_WEIGHT,
    STEP,
    Calibration,
    ForecastError,
    log_loss,
    log_odds,
)
from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.outcomes import SLOTS, TOLERANCE_S, Outcomes
from cluster.forecast.table import FunctionTable
from cluster.forecast.weights import FADING, SHARED_FADING, SHARED_WEIGHT, TRUST, Weights
from tests.support.draws import draws

HORIZONS = len(HORIZONS_S)


@settings(max_examples=draws(25))
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 12))
def test_calibration(seed: int, predictors: int, lots: int) -> None:
    rng = np.random.default_rng(seed)
    calibration = Calibration(HORIZONS, predictors)
    learned: list[tuple[int, np.ndarray, np.ndarray]] = []
    for _ in range(lots):
        horizon, odds = int(rng.integers(HORIZONS)), rng.normal(0, 4, (5, predictors)).clip(-FARTHEST, FARTHEST)
        came = rng.random(5) < 0.5
        calibration.learn(horizon, odds.astype(np.float32), came, 0.9)
        learned.append((horizon, odds, came))
    asked = rng.normal(0, 4, (3, HORIZONS, predictors)).clip(-FARTHEST, FARTHEST).astype(np.float32)
    found = calibration.chances(asked)

    def rate(horizon: int, predictor: int, centre: int) -> float:
        own = [(odds[:, predictor], came) for number, odds, came in learned if number == horizon]
        total, came_of = PRIOR_WEIGHT, PRIOR_WEIGHT / (1 + exp(FARTHEST - centre * STEP))
        for age, (odds, came) in enumerate(reversed(own)):
            near = np.maximum(0, 1 - np.abs((odds + FARTHEST) / STEP - centre)) * 0.9**age
            total, came_of = total + near.sum(), came_of + near[came].sum()
        return came_of / total

    for row, horizon, predictor in np.ndindex(asked.shape):
        place = (float(asked[row, horizon, predictor]) + FARTHEST) / STEP
        below = min(int(place), BINS - 2)
        expected = sum((1 - abs(place - centre)) * rate(horizon, predictor, centre) for centre in (below, below + 1))
        assert found[row, horizon, predictor] == pytest.approx(expected, abs=1e-5)
    one = calibration.chances(asked[:, 2, -1:], 2, slice(-1, None))
    assert one == pytest.approx(found[:, 2, -1:], abs=1e-6)


def test_log_odds_and_loss_are_finite() -> None:
    chances = np.array([0.0, 1e-9, 0.5, 1.0], np.float32)
    assert log_odds(chances) == pytest.approx([-FARTHEST, -FARTHEST, 0.0, FARTHEST], abs=1e-3)
    loss = log_loss(chances, np.array([True, False, True, False]))
    assert np.isfinite(loss).all() and loss[2] == pytest.approx(log(2)) and loss[0] > 10 and loss[3] > 10


@settings(max_examples=draws(25))
@given(st.lists(st.tuples(st.sampled_from([1.0, 1.3, 2.0, 9.0]), st.sets(st.integers(0, 4))), max_size=40))
def test_outcomes(seconds: list[tuple[float, set[int]]]) -> None:
    """What waits for its outcome has the number of the observation that it was taken at for log-odds."""
    table = FunctionTable(10, 1e9)
    outcomes = Outcomes(table, 1)
    called: list[set[str]] = []
    moments: list[float] = []
    known: list[set[str]] = []
    now = 0.0
    for number, (elapsed, numbers) in enumerate(seconds * 10):
        now += elapsed
        called.append({str(each) for each in numbers})
        moments.append(now)
        table.record(sorted(called[-1]), now)
        for horizon, rows, odds, came in outcomes.resolve_due(now):
            at = int(odds[0, 0])
            assert abs(now - moments[at] - HORIZONS_S[horizon]) <= TOLERANCE_S
            since = set[str]().union(*called[at + 1 :])
            found = dict(zip((table.keys[row] for row in rows), came.tolist(), strict=True))
            assert found == {key: key in since for key in known[at]}
        known.append(set(table.keys))
        outcomes.record(now, np.full((len(table), HORIZONS, 1), number, np.float32))


def test_outcomes_are_taken_evenly() -> None:
    table = FunctionTable(10, 1e9)
    outcomes = Outcomes(table, 1)
    judged = [0] * HORIZONS
    for second in range(1, 901):
        table.record(["a"], float(second))
        for horizon, *_ in outcomes.resolve_due(float(second)):
            judged[horizon] += 1
        outcomes.record(float(second), np.zeros((1, HORIZONS, 1), np.float32))
    for horizon, count in enumerate(judged):
        assert count == pytest.approx((900 - HORIZONS_S[horizon]) * SLOTS[horizon] / HORIZONS_S[horizon], abs=1)


@settings(max_examples=draws(25))
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 30))
def test_weights(seed: int, predictors: int, lots: int) -> None:
    rng = np.random.default_rng(seed)
    table = FunctionTable(10, 1e9)
    weights = Weights(table, HORIZONS, predictors)
    table.record(["a", "b", "c"], 0.0)
    losses: list[tuple[int, dict[int, list[float]]]] = []
    for _ in range(lots):
        horizon, rows = int(rng.integers(HORIZONS)), np.flatnonzero(rng.random(3) < 0.6)
        chances, came = rng.uniform(0.01, 0.99, (len(rows), predictors)), rng.random(len(rows)) < 0.5
        weights.learn(horizon, rows, chances.astype(np.float32), came)
        each = [[-log(p if yes else 1 - p) for p in of] for of, yes in zip(chances, came, strict=True)]
        losses.append((horizon, dict(zip(rows.tolist(), each, strict=True))))
    chances = rng.uniform(0.01, 0.99, (3, HORIZONS, predictors)).astype(np.float32)
    mixed = weights.mix(chances)
    for row, horizon in np.ndindex(3, HORIZONS):
        lots_of = [of for number, of in losses if number == horizon]
        own = [of[row] for of in lots_of if row in of]
        belief = []
        for predictor in range(predictors):
            own_loss = sum(FADING[horizon] ** age * of[predictor] for age, of in enumerate(reversed(own)))
            faded = [(SHARED_FADING**age, of) for age, of in enumerate(reversed(lots_of))]
            total = sum(weight * sum(loss[predictor] for loss in of.values()) for weight, of in faded)
            mean = total / max(1.0, sum(weight * len(of) for weight, of in faded))
            belief.append(-TRUST[horizon] * (own_loss + SHARED_WEIGHT * mean))
        belief = [exp(each - max(belief)) for each in belief]
        expected = sum(b * p for b, p in zip(belief, chances[row, horizon], strict=True)) / sum(belief)
        assert mixed[row, horizon] == pytest.approx(expected, rel=1e-3)


def test_forecast_error() -> None:
    errors = ForecastError()
    assert errors.means() == {}
    errors.add(1, np.array([0.5, 0.5]), np.array([True, False]))
    errors.add(1, np.array([0.9]), np.array([True]))
    found = errors.means()
    weight = 1 + 2 * ERROR_FADING
    assert found == {
        "log_loss_within_5_s": pytest.approx((2 * ERROR_FADING * log(2) - log(0.9)) / weight),
        "brier_within_5_s": pytest.approx((0.5 * ERROR_FADING + 0.01) / weight),
    }
