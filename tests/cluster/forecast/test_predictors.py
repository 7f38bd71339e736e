"""Each predictor against plain Python that goes over all calls again."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.idle_times import EDGES_S, HALF_LIFE, SHARED_HALF_LIFE, SHARED_WEIGHT, IdleTimes
from cluster.forecast.recent_rate import Ewma, LastWindow
from cluster.forecast.seasonal import SEASONS, SHRINKAGE, Season, Seasonal
from tests.cluster.forecast.seconds import MONDAY, Calls, drawn_calls, drive
from tests.support.draws import draws


def of_rate(rate: float) -> list[float]:
    return [1 - exp(-rate * horizon) for horizon in HORIZONS_S]


@settings(max_examples=draws(30))
@given(drawn_calls, st.sampled_from([10.0, 30.0]))
def test_last_window(calls: list[Calls], window: float) -> None:
    begin = None
    seen: list[tuple[int, dict[str, int]]] = []
    for (elapsed, counts), (now, chances) in zip(
        calls, drive(lambda table: LastWindow(table, window), calls, 1e9), strict=True
    ):
        begin = now - elapsed if begin is None else begin
        number = int((now - elapsed - begin) // window)
        seen.append((number, counts))
        over = min(1.0, (now - begin - number * window) / window)
        for key, found in chances.items():
            running, before = (sum(c.get(key, 0) for n, c in seen if n == at) for at in (number, number - 1))
            assert found == pytest.approx(of_rate((running + before * (1 - over)) / window), abs=1e-5)


@settings(max_examples=draws(30))
@given(drawn_calls)
def test_ewma(calls: list[Calls]) -> None:
    seen: list[tuple[float, dict[str, int]]] = []
    for (_, counts), (now, chances) in zip(calls, drive(lambda table: Ewma(table, 60.0), calls, 1e9), strict=True):
        seen.append((now, counts))
        for key, found in chances.items():
            rate = sum(counts.get(key, 0) * exp((at - now) / 60) / 60 for at, counts in seen)
            assert found == pytest.approx(of_rate(rate), abs=1e-5)


def longer(histogram: list[float], idle: float) -> float:
    """The weight of idle times longer than this, evenly spread inside their bin."""
    total = 0.0
    for number, weight in enumerate(histogram):
        if number == len(EDGES_S) - 1:
            return total + weight
        begin, end = EDGES_S[number], EDGES_S[number + 1]
        total += weight * min(1.0, max(0.0, (end - idle) / (end - begin)))
    raise AssertionError


@settings(max_examples=draws(30))
@given(drawn_calls)
def test_idle_times(calls: list[Calls]) -> None:
    shared = [1.0] * len(EDGES_S)
    own: dict[str, list[int]] = {}
    last: dict[str, float] = {}
    for (_, counts), (now, chances) in zip(calls, drive(IdleTimes, calls, 1e9), strict=True):
        bins = []
        for key in counts:
            idle = now - last.get(key, -np.inf)
            bins.append(next((n for n in range(len(EDGES_S) - 1) if idle <= EDGES_S[n + 1]), len(EDGES_S) - 1))
            own.setdefault(key, []).append(bins[-1])
            last[key] = now
        shared = [weight * 0.5 ** (len(bins) / SHARED_HALF_LIFE) + bins.count(n) for n, weight in enumerate(shared)]
        for key, found in chances.items():
            histogram = [SHARED_WEIGHT * weight / sum(shared) for weight in shared]
            for age, number in enumerate(reversed(own[key])):
                histogram[number] += 0.5 ** (age / HALF_LIFE)
            lasting = longer(histogram, min(now - last[key], EDGES_S[-1]))
            after = [longer(histogram, min(now - last[key] + horizon, EDGES_S[-1])) for horizon in HORIZONS_S]
            assert found == pytest.approx([1 - each / lasting for each in after], abs=1e-4)


def test_a_timer_is_recognised() -> None:
    calls: list[Calls] = [(1.0, {"timer": 1} if second % 40 == 0 else {}) for second in range(600)]
    *_, (_, chances) = drive(IdleTimes, calls)  # 39 seconds after the last call
    assert chances["timer"][1] > 0.5 and chances["timer"][2] > 0.7
    *_, (_, chances) = drive(IdleTimes, calls[:-34])  # 5 seconds after
    assert chances["timer"][0] < 0.05 and chances["timer"][1] < 0.05


def weight_and_time(season: Season, born: float, now: float) -> tuple[int, float]:
    """The slot that it is, and the weighted seconds that were spent in it since birth."""
    slot = int((now - season.begin_s) % season.period_s // season.slot_s)
    period, total, weight = int((now - season.begin_s) // season.period_s), 0.0, 1.0
    while (end := season.begin_s + period * season.period_s + (slot + 1) * season.slot_s) > born:
        total += weight * max(0.0, min(end, now) - max(end - season.slot_s, born))
        period, weight = period - 1, weight * season.fading
    return slot, total


HOURS = 3600.0
days = st.lists(
    st.tuples(
        st.sampled_from([1.0, 600.0, 1800.0, 5 * HOURS, 24 * HOURS, 72 * HOURS]),
        st.dictionaries(st.sampled_from("ab"), st.integers(1, 3), max_size=2),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=draws(40))
@given(days)
def test_seasonal(calls: list[Calls]) -> None:
    """Also of functions that left the table, and came back."""
    born: dict[str, float] = {}
    seen: list[tuple[float, dict[str, int]]] = []
    for (_, counts), (now, chances) in zip(calls, drive(Seasonal, calls), strict=True):
        unix = MONDAY + now
        born |= {key: unix - 1 for key in counts if key not in born}
        seen.append((unix, counts))
        for key, found in chances.items():
            shares = []
            for season in SEASONS:
                slot, spent = weight_and_time(season, born[key], unix)
                number = (unix - season.begin_s) // season.period_s
                of_slot = [
                    count.get(key, 0) * season.fading ** (number - (at - season.begin_s) // season.period_s)
                    for at, count in seen
                    if (at - season.begin_s) % season.period_s // season.slot_s == slot
                ]
                shares.append((sum(of_slot), spent))
            (hour, in_hour), (day, in_day), (all_calls, age) = shares
            rate = all_calls / max(age, 1.0)
            for number_of, spent in ((hour, in_hour), (day, in_day)):
                rate *= (number_of + SHRINKAGE) / (all_calls / max(age, 1.0) * spent + SHRINKAGE)
            assert found == pytest.approx(of_rate(rate), abs=1e-4, rel=1e-3)
