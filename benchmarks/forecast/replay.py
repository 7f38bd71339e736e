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
"""Slot of ServeGen's counts in seconds, and in ticks of a minute."""
MAX_DRAWN = 600
"""Arrivals drawn in a slot; of more, each stands for several."""
MONDAY = 1_573_430_400
"""Unix seconds of 00:00 UTC of a Monday, at which traces without a date begin."""


@dataclass(frozen=True)
class Arrivals:
    """Calls by tick and function."""

    begin: float
    tick_s: float
    counts: list[dict[str, int]]
    """by tick: function number -> calls"""
    before: np.ndarray
    """i32[ticks + 1, functions]: ticks with calls before each tick"""

    def arrived(self, tick: int, functions: np.ndarray) -> np.ndarray:
        """bool[functions, horizons]: whether a call came in the ticks behind this one."""
        ends = [tick + 1 + max(1, round(horizon / self.tick_s)) for horizon in HORIZONS_S]
        rows = self.before[np.minimum(ends, len(self.before) - 1)][:, functions]
        arrived: np.ndarray = (rows > self.before[tick + 1][functions]).T
        return arrived


@dataclass(frozen=True)
class Judged:
    """Forecasts, and what came."""

    unix: np.ndarray
    function: np.ndarray
    """i64[forecasts]"""
    chances: np.ndarray
    """f32[forecasts, horizons, parts and their mixture]"""
    arrived: np.ndarray
    """bool[forecasts, horizons]"""


def second_arrivals(minutes: np.ndarray, seed: int, begin: float) -> Arrivals:
    """Draws arrivals from i64[functions, minutes] counts, uniformly within each minute."""
    rng = np.random.default_rng(seed)
    function, minute = np.nonzero(minutes)
    times = minutes[function, minute]
    second = ((np.repeat(minute, times) + rng.random(int(times.sum()))) * 60).astype(np.int64)
    once, shape = np.ones(len(second), np.int64), (len(minutes), minutes.shape[1] * 60)
    return _gather(np.repeat(function, times), second, once, shape=shape, begin=begin, tick_s=1.0)


def servegen_arrivals(seed: int, days: int) -> Arrivals:
    """Draws arrivals by minute. Within ten minutes, times between calls are Gamma with the slot's variation."""
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
    stride: int,
    judged_from: float,
    at_tick: Callable[[int], None] | None = None,
) -> Judged:
    """Replays the arrivals. Returns the forecasts of each `stride`-th tick, from `judged_from` seconds on.

    `at_tick` is called before each tick.
    """
    last = len(arrivals.counts) - round(HORIZONS_S[-1] / arrivals.tick_s)
    unix, function, chances, arrived = [list[np.ndarray]() for _ in range(4)]
    for tick, counts in enumerate(arrivals.counts):
        if at_tick:
            at_tick(tick)
        now = arrivals.begin + (tick + 1) * arrivals.tick_s
        forecaster.observe(now, counts)
        if tick % stride == 0 and now >= arrivals.begin + judged_from and tick < last:
            keys, said = forecaster.forecast_parts(now)
            function.append(np.array(keys, np.int64))
            unix.append(np.full(len(keys), now))
            chances.append(said.astype(np.float32))
            arrived.append(arrivals.arrived(tick, function[-1]))
    return Judged(*(np.concatenate(each) for each in (unix, function, chances, arrived)))


def metrics(chances: np.ndarray, arrived: np.ndarray) -> dict[str, float]:
    """Returns metrics of f32[forecasts] probabilities and bool[forecasts] outcomes.

    A call is forecast where its probability is 0.5 or more.
    """
    chances = chances.astype(np.float64)
    yes = chances >= 0.5
    parts = [float((yes == arrived)[of].mean()) for of in (arrived, ~arrived) if of.any()]
    likelihood = np.clip(np.where(arrived, chances, 1 - chances), 1e-7, 1)
    return {
        "forecasts": len(arrived),
        "base_rate": float(arrived.mean()),
        "accuracy": float((yes == arrived).mean()),
        "always_no": float(1 - arrived.mean()),
        "balanced_accuracy": float(np.mean(parts)),
        "pr_area": average_precision(chances, arrived),
        "log_loss": float(-np.log(likelihood).mean()),
        "brier": float(((chances - arrived) ** 2).mean()),
        "calibration_error": calibration_error(chances, arrived),
    }


def average_precision(chances: np.ndarray, arrived: np.ndarray) -> float:
    """The area under precision over recall, in steps; equal probabilities are one step. 0 if nothing came."""
    order = np.argsort(-chances, kind="stable")
    hits = np.cumsum(arrived[order])
    ends = np.flatnonzero(np.diff(chances[order], append=-1.0))
    calls = hits[ends]
    if not len(calls) or not calls[-1]:
        return 0.0
    return float((calls / (ends + 1) * np.diff(calls, prepend=0)).sum() / calls[-1])


def calibration_error(chances: np.ndarray, arrived: np.ndarray) -> float:
    """Mean distance, over ten equally wide bins of probability by their forecasts, of what was said from what came."""
    cell = np.minimum((chances * 10).astype(np.int64), 9)
    said, of = (np.bincount(cell, each, 10) for each in (chances, arrived.astype(float)))
    return float(np.abs(said - of).sum() / len(arrived))
