"""Calls of real functions, replayed to a forecaster, and what it said of them."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.common.report import ROOT
from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.forecaster import Forecaster

SERVEGEN = ROOT / "benchmarks" / "data" / "servegen_m_large_10min.csv.gz"
SLOT_S, SLOT_TICKS = 600.0, 10
"""Of ServeGen's counts; a tick is a minute."""
MAX_DRAWN = 600
"""Arrivals drawn in a slot; of more, each stands for several."""
MONDAY = 1_573_430_400
"""00:00 UTC of one, in unix seconds: where a trace says nothing else, it begins there."""


@dataclass(frozen=True)
class Arrivals:
    """Calls by tick and function."""

    begin: float
    """Unix seconds"""
    tick_s: float
    counts: list[dict[str, int]]
    """Of each tick: function number -> calls"""
    before: np.ndarray
    """i32[ticks + 1, functions]: ticks with calls before each tick"""

    def came(self, tick: int, functions: np.ndarray) -> np.ndarray:
        """bool[functions, horizons]: whether a call came in the ticks behind this one."""
        ends = [tick + 1 + max(1, round(horizon / self.tick_s)) for horizon in HORIZONS_S]
        rows = self.before[np.minimum(ends, len(self.before) - 1)][:, functions]
        came: np.ndarray = (rows > self.before[tick + 1][functions]).T
        return came


@dataclass(frozen=True)
class Judged:
    """Forecasts, and what came."""

    unix: np.ndarray
    """f64[forecasts]"""
    function: np.ndarray
    """i64[forecasts]"""
    chances: np.ndarray
    """f32[forecasts, horizons, parts and their mixture]"""
    came: np.ndarray
    """bool[forecasts, horizons]"""


def second_arrivals(minutes: np.ndarray, seed: int, begin: float) -> Arrivals:
    """From i64[functions, minutes] counts: arrivals inside a minute are drawn by us, each evenly by itself."""
    rng = np.random.default_rng(seed)
    function, minute = np.nonzero(minutes)
    times = minutes[function, minute]
    second = ((np.repeat(minute, times) + rng.random(int(times.sum()))) * 60).astype(np.int64)
    once, shape = np.ones(len(second), np.int64), (len(minutes), minutes.shape[1] * 60)
    return _gather(np.repeat(function, times), second, once, shape=shape, begin=begin, tick_s=1.0)


def servegen_arrivals(seed: int, days: int) -> Arrivals:
    """By minute; inside ten minutes, times between calls are drawn by us from a Gamma law with the slot's variation."""
    rng = np.random.default_rng(seed)
    with gzip.open(SERVEGEN, "rt", newline="") as stream:
        lines = list(csv.reader(stream))[1:]
    slots = round(days * 86_400 / SLOT_S)
    functions, ticks, counts = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for number, (calls, variation) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        for slot, (count, cv) in enumerate(zip(calls[2 : 2 + slots], variation[2 : 2 + slots], strict=True)):
            if not (drawn := min(int(count), MAX_DRAWN)):
                continue
            gaps = rng.gamma(1 / max(0.1, float(cv or 1)) ** 2, size=drawn + 1) + 1e-9
            at = np.cumsum(gaps[:-1]) / gaps.sum() * SLOT_TICKS
            ticks.append(slot * SLOT_TICKS + np.minimum(at.astype(np.int64), SLOT_TICKS - 1))
            counts.append(np.full(drawn, int(count) // drawn))
            functions.append(np.full(drawn, number))
    called, at_tick, times = (np.concatenate(each) for each in (functions, ticks, counts))
    shape = len(lines) // 2, slots * SLOT_TICKS
    return _gather(called, at_tick, times, shape=shape, begin=MONDAY, tick_s=60.0)


def _gather(
    function: np.ndarray,
    tick: np.ndarray,
    count: np.ndarray,
    *,
    shape: tuple[int, int],
    begin: float,
    tick_s: float,
) -> Arrivals:
    """Gathers calls, whose function, tick and count are i64[n]. `shape` is that of functions and ticks."""
    functions, ticks = shape
    total = (
        np.bincount(tick * functions + function, count, ticks * functions).reshape(ticks, functions).astype(np.int64)
    )
    before = np.zeros((ticks + 1, functions), np.int32)
    np.cumsum(total > 0, axis=0, out=before[1:])
    names = [str(number) for number in range(functions)]
    counts = [{names[each]: int(row[each]) for each in np.flatnonzero(row).tolist()} for row in total]
    return Arrivals(begin, tick_s, counts, before)


def replay(
    forecaster: Forecaster,
    arrivals: Arrivals,
    *,
    every: int,
    judged_from: float,
    at_tick: Callable[[int], None] | None = None,
) -> Judged:
    """What was forecast at every so many ticks, from `judged_from` seconds on. `at_tick` is called before each tick."""
    last = len(arrivals.counts) - round(HORIZONS_S[-1] / arrivals.tick_s)
    unix, function, chances, came = [list[np.ndarray]() for _ in range(4)]
    for tick, counts in enumerate(arrivals.counts):
        if at_tick:
            at_tick(tick)
        now = arrivals.begin + (tick + 1) * arrivals.tick_s
        forecaster.observe(now, counts)
        if tick % every == 0 and now >= arrivals.begin + judged_from and tick < last:
            keys, said = forecaster.forecast_parts(now)
            function.append(np.array(keys, np.int64))
            unix.append(np.full(len(keys), now))
            chances.append(said.astype(np.float32))
            came.append(arrivals.came(tick, function[-1]))
    return Judged(*(np.concatenate(each) for each in (unix, function, chances, came)))


def metrics(chances: np.ndarray, came: np.ndarray) -> dict[str, float]:
    """Of f32[forecasts] probabilities and bool[forecasts]. A call is forecast where its probability is 0.5 or more."""
    chances = chances.astype(np.float64)
    yes = chances >= 0.5
    parts = [float((yes == came)[of].mean()) for of in (came, ~came) if of.any()]
    given = np.clip(np.where(came, chances, 1 - chances), 1e-7, 1)
    return {
        "forecasts": len(came),
        "base_rate": float(came.mean()),
        "accuracy": float((yes == came).mean()),
        "always_no": float(1 - came.mean()),
        "balanced_accuracy": float(np.mean(parts)),
        "pr_area": average_precision(chances, came),
        "log_loss": float(-np.log(given).mean()),
        "brier": float(((chances - came) ** 2).mean()),
        "calibration_error": calibration_error(chances, came),
    }


def average_precision(chances: np.ndarray, came: np.ndarray) -> float:
    """The area under precision over recall, in steps; equal probabilities are one step. 0 if nothing came."""
    order = np.argsort(-chances, kind="stable")
    hits = np.cumsum(came[order])
    ends = np.flatnonzero(np.diff(chances[order], append=-1.0))
    calls = hits[ends]
    if not len(calls) or not calls[-1]:
        return 0.0
    return float((calls / (ends + 1) * np.diff(calls, prepend=0)).sum() / calls[-1])


def calibration_error(chances: np.ndarray, came: np.ndarray) -> float:
    """Mean distance, over ten equally wide bins of probability by their forecasts, of what was said from what came."""
    cell = np.minimum((chances * 10).astype(np.int64), 9)
    said, of = (np.bincount(cell, each, 10) for each in (chances, came.astype(float)))
    return float(np.abs(said - of).sum() / len(came))
