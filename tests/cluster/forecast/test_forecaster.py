"""The forecaster as a whole: what it says of functions whose law is known, and what its clock and table survive."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest

from cluster.forecast import forecaster as module
from cluster.forecast.chances import HORIZONS_S, Chances, Forecasts, Likely
from cluster.forecast.forecaster import ACTIVE_S, PARTS, Forecaster
from tests.cluster.forecast.seconds import MONDAY


def replay(forecaster: Forecaster, called: np.ndarray) -> None:
    """bool[seconds, functions]"""
    for second, row in enumerate(called, 1):
        forecaster.observe(MONDAY + second, {str(number): 1 for number in np.flatnonzero(row)})


def sound(forecasts: Mapping[str, Chances]) -> bool:
    return all(0 <= low <= high <= 1 for each in forecasts.values() for low, high in pairwise(each))


def test_probabilities_hold() -> None:
    """Of functions that are called by Poisson's law, as often as was said, in each third by what was said."""
    rng = np.random.default_rng(1)
    rates = np.exp(rng.uniform(np.log(0.003), np.log(0.3), 150))
    called = rng.random((1500, 150)) < -np.expm1(-rates)
    forecaster = Forecaster()
    replay(forecaster, called[:900])
    said, truth = [], []
    for second in range(900, 1500):
        forecaster.observe(MONDAY + second + 1, {str(number): 1 for number in np.flatnonzero(called[second])})
        if second % 25 == 0:
            found = forecaster.forecast(MONDAY + second + 1)
            assert sound(found)
            said.append(np.array(list(found.values())))
            truth.append(
                np.minimum(-np.expm1(-rates[[int(key) for key in found], None] * np.array(HORIZONS_S)), 1 - 1e-9)
            )
    for horizon in range(len(HORIZONS_S)):
        forecast, true = (np.concatenate(each)[:, horizon] for each in (said, truth))
        order = np.argsort(forecast)
        for part in np.array_split(order, 3):
            assert forecast[part].mean() == pytest.approx(true[part].mean(), abs=0.03, rel=0.15)
        worse = true * np.log(true / forecast) + (1 - true) * np.log((1 - true) / (1 - forecast))
        assert worse.mean() < 0.06, "nats of log loss above what the true probabilities have"


def test_the_mixture_is_no_worse_than_its_parts() -> None:
    """Timers, which idle times know, among bursts, which the last window knows."""
    rng = np.random.default_rng(2)
    called = np.zeros((1800, 60), bool)
    for number in range(30):
        called[int(rng.integers(50)) :: int(rng.integers(35, 80)), number] = True
    for number in range(30, 60):
        busy = np.repeat(rng.random(1 + 1800 // 200) < 0.3, 200)[:1800]
        called[:, number] = busy & (rng.random(1800) < 0.2)
    forecaster = Forecaster()
    losses = []
    for second in range(1800 - 30):
        forecaster.observe(MONDAY + second + 1, {str(number): 1 for number in np.flatnonzero(called[second])})
        if second >= 600 and second % 10 == 0:
            keys, chances = forecaster.forecast_parts(MONDAY + second + 1)
            came = called[second + 1 : second + 31, [int(key) for key in keys]].any(axis=0)
            losses.append(-np.log(np.where(came[:, None], chances[:, 2], 1 - chances[:, 2])))
    *parts, mixture = np.concatenate(losses).mean(axis=0)
    assert forecaster.parts == tuple(PARTS)
    assert mixture < min(parts) + 0.005
    assert set(forecaster.error()) == {f"{kind}_{field}" for kind in ("log_loss", "brier") for field in Chances._fields}
    assert forecaster.error()["log_loss_within_30_s"] < max(parts)


@pytest.mark.parametrize("predictor", ["mix", *PARTS])
def test_silence_is_forecast(predictor: str) -> None:
    forecaster = Forecaster(predictor)
    assert forecaster.forecast(MONDAY) == {}
    for second in range(1, 400):
        forecaster.observe(MONDAY + second, {"a": 1, "none": 0} if second == 5 else {})
        found = forecaster.forecast(MONDAY + second)
        assert set(found) == ({"a"} if second >= 5 else set()) and sound(found)
    assert found["a"].within_1_s < 0.1
    assert all(np.isfinite(value) for value in forecaster.error().values())


def test_forecasts_in_between_change_nothing() -> None:
    """Nor do those asked for late or early: what is learned depends on what was observed alone."""
    quiet, asked = Forecaster(), Forecaster()
    rng = np.random.default_rng(4)
    asked.forecast(MONDAY - 5)
    for second in range(1, 120):
        counts = {str(number): 1 for number in rng.integers(0, 6, 2)}
        for forecaster in (quiet, asked):
            forecaster.observe(MONDAY + second, counts)
        found = asked.forecast(MONDAY + second)
        assert asked.forecast(MONDAY + second + 0.4) == found == quiet.forecast(MONDAY + second)
    later = quiet.forecast(MONDAY + 119 + 60)
    assert all(later[key].within_30_s < found[key].within_30_s for key in found)
    assert asked.forecast(MONDAY + 119 + 60) == later


def test_the_likeliest_functions() -> None:
    chances = np.array([[0.0, 0.0, within, 1.0] for within in (0.1, 0.9, 0.05, 0.5, 0.9)], np.float32)
    found = Forecasts(list("abcde"), chances)
    assert [each.key for each in found.likeliest(0.1, 10)] == ["b", "e", "d", "a"]
    assert found.likeliest(0.1, 3)[2] == Likely("d", 0.5)
    assert (found["d"], found.get("f"), found.likeliest(0.95, 3)) == (Chances(0.0, 0.0, 0.5, 1.0), None, [])


def test_unknown_predictor() -> None:
    with pytest.raises(ValueError, match="'arima'; known are mix, last_window, ewma, seasonal, histogram, lstm"):
        Forecaster("arima")


def test_half_an_hour_of_silence() -> None:
    forecaster = Forecaster()
    forecaster.observe(MONDAY, {"a": 1})
    forecaster.observe(MONDAY + 60, {"b": 1})
    assert set(forecaster.forecast(MONDAY + ACTIVE_S)) == {"a", "b"}
    assert set(forecaster.forecast(MONDAY + ACTIVE_S + 1)) == {"b"}
    assert forecaster.forecast(MONDAY + ACTIVE_S + 61) == {}


def test_functions_that_fall_silent_are_learned_from() -> None:
    """Also from those that leave while their outcome is awaited: nothing is called twice here, every other time once
    more after 29 minutes."""
    forecaster = Forecaster()
    for tick in range(720):
        counts = {f"once {tick}": 1}
        if tick >= 174:
            counts[f"once {tick - 174}"] = tick % 2
        forecaster.observe(MONDAY + 10 * tick, counts)
    chances = forecaster.forecast(MONDAY + 7190)
    idle = np.array([719 - int(key.split()[1]) for key in chances])
    within = np.array([each.within_300_s for each in chances.values()])
    unknown = np.isin(idle, range(150, 174))  # half of them will be called, and no idle time tells which
    assert within[unknown].mean() == pytest.approx(0.5, abs=0.15)
    assert within[idle < 100].mean() < 0.05


def test_missed_seconds_and_a_clock_that_goes_back() -> None:
    forecaster = Forecaster()
    rng = np.random.default_rng(3)
    unix = MONDAY
    for step in (*[1.0] * 50, 0.2, 1.7, 0.0, 17.0, 299.0, *[1.0] * 20, -7200.0, *[1.0] * 40, -0.5, *[0.98, 1.03] * 20):
        unix += step
        forecaster.observe(unix, {str(number): 1 for number in rng.integers(0, 5, 2)})
        assert sound(forecaster.forecast(unix))
    assert set(forecaster.forecast(unix)) == set("01234")
    assert set(forecaster.forecast(unix - 50)) == set("01234")


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FUNCTIONS", 100)
    forecaster = Forecaster()
    for second in range(1, 60):
        forecaster.observe(MONDAY + second, {str(number): 1 for number in range(40 * second, 40 * second + 40)})
        found = forecaster.forecast(MONDAY + second)
        assert len(found) == min(100, 40 * second) and sound(found)
        assert str(40 * second) in found
