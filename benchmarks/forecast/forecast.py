"""Forecasts of which functions are called soon: quality and cost of each predictor.

Functions: InVitro's 500-function, 8-hour sample of the Azure 2019 trace, whose half (every second one by calls) is
reported; everything was chosen, and the network first trained, on the other half. Its counts are per minute: arrivals
inside the minute are drawn. Days: ServeGen's clients, whose first week is learned and second week reported.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy; matrices are small, and threads wait for each other

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.common.report import arguments, publish, report
from benchmarks.common.trace import minute_counts
from benchmarks.forecast.replay import MONDAY, Judged, metrics, replay, second_arrivals, servegen_arrivals
from benchmarks.forecast.training import Recorder, train
from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.forecaster import PARTS, Forecaster, Maker
from cluster.forecast.lstm import Lstm
from cluster.forecast.lstm_cells import Parameters, draw_parameters, read_out, states
from cluster.forecast.lstm_training import Observations, Trainer
from cluster.forecast.recent_rate import LastWindow

BEGIN = MONDAY + 8 * 3600.0
"""The trace's minute 480; its date is not known."""
TOP = 10
"""The busiest functions of the sample make nine tenths of its calls; half of them are among those reported."""
EVERY = 7
"""Ticks between the forecasts that are judged: no divisor of the minutes, and ten minutes, that traces count in."""
DECISIVE = 2
"""The horizon of 30 s, as in Predictive-LoRA"""
COST_TIMEOUT_S = 300.0
CALLED_EVERY = 120
"""Seconds between the calls of a function where time is measured, in the mean"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes of what is replayed."""

    functions: int | None = None
    """number of the busiest; None: all"""
    minutes: int = 480
    short_minutes: int = 120
    """length of drift and windows"""
    days: int = 14
    training_steps: int = 1200
    warm_up_s: float = 1800.0
    windows_s: tuple[float, ...] = (10.0, 30.0, 60.0, 120.0)
    sizes: tuple[int, ...] = (1000, 10_000, 40_000)
    timed_s: int = 30


QUICK = Scale(60, 7, 12, 1, 3, 60.0, (30.0,), (1000,), 2)


def with_lstm(trainer: Trainer) -> dict[str, Maker]:
    return {**PARTS, "lstm": partial(Lstm, trainer=trainer)}


def names_of(forecaster: Forecaster, mixture: str) -> list[str]:
    return [*forecaster.parts, mixture]


def record(minutes: np.ndarray, window_s: float, seed: int) -> list[Observations]:
    """Returns the observations on which the network would have been trained."""
    recorder = Recorder(draw_parameters(np.random.default_rng(seed)))
    forecaster = Forecaster(mixed={"lstm": partial(Lstm, trainer=recorder, window_s=window_s)})
    for second, counts in enumerate(second_arrivals(minutes, seed, BEGIN).counts, 1):
        forecaster.observe(BEGIN + second, counts)
    return recorder.lots


def rows_of(kind: str, judged: Judged, names: list[str], *, horizons: range, of: np.ndarray, **case: Any) -> list[Row]:
    """A row for each predictor and horizon, over those forecasts; none if there is none."""
    if not of.any():
        return []
    return [
        {
            "kind": kind, **case, "horizon_s": HORIZONS_S[horizon], "predictor": name,
            **metrics(judged.chances[of, horizon, number], judged.arrived[of, horizon]),
        }
        for horizon in horizons
        for number, name in enumerate(names)
    ]  # fmt: skip


def functions_held_out(minutes: np.ndarray, parameters: Parameters, *, warm_up_s: float, seed: int) -> list[Row]:
    """Every predictor on functions that nothing was chosen on."""
    arrivals = second_arrivals(minutes, seed + 1, BEGIN)
    plain, wide = Forecaster(), Forecaster(mixed=with_lstm(Trainer(parameters)))
    judged_plain = replay(plain, arrivals, stride=EVERY, judged_from=warm_up_s)
    with_network = replay(wide, arrivals, stride=EVERY, judged_from=warm_up_s)
    more = with_network.chances[:, :, -2:]
    judged = Judged(
        judged_plain.unix,
        judged_plain.function,
        np.concatenate([judged_plain.chances, more], axis=2),
        judged_plain.arrived,
    )
    names = [*names_of(plain, "mix"), "lstm", "mix_with_lstm"]
    horizons, one = range(len(HORIZONS_S)), range(DECISIVE, DECISIVE + 1)
    rows = []
    for without in (0, TOP):
        rows += rows_of(
            "function", judged, names, horizons=horizons, of=judged.function >= without // 2, without_top=without
        )
    decile = judged.function * 10 // len(minutes)
    for number in range(10):
        rows += rows_of("decile", judged, names, horizons=one, of=decile == number, decile=number)
    hour = judged.unix % 86_400 // 3600
    for number in range(24):
        rows += rows_of("hour", judged, names, horizons=one, of=hour == number, hour=number)
    return rows


def days_held_out(seed: int, days: int) -> list[Row]:
    """The first half of the days is learned, the second reported."""
    forecaster = Forecaster()
    judged = replay(forecaster, servegen_arrivals(seed, days), stride=EVERY, judged_from=days / 2 * 86_400)
    names, last = names_of(forecaster, "mix"), range(3, 4)
    rows = rows_of("day", judged, names, horizons=last, of=np.ones(len(judged.unix), bool))
    hours, weekday = judged.unix % 86_400 // 3600 // 3 * 3, (judged.unix - MONDAY) // 86_400 % 7
    for number in range(0, 24, 3):
        rows += rows_of("day_hour", judged, names, horizons=last, of=hours == number, hour=number)
    for number in range(7):
        rows += rows_of("weekday", judged, names, horizons=last, of=weekday == number, weekday=number)
    return rows


class Freezing(Forecaster):
    """Stops to learn what is common to all functions, and the weights of predictors."""

    frozen = False

    def _learn(self) -> None:
        if not self.frozen:
            super()._learn()


class FreezingTrainer(Trainer):
    frozen = False

    def update(self) -> float | None:
        return None if self.frozen else super().update()


def drift(minutes: np.ndarray, parameters: Parameters, seed: int) -> list[Row]:
    """Half-way every function gets the calls of another, drawn one; from then on it is learned, or not."""
    half = minutes.shape[1] // 2
    shuffled = minutes.copy()
    shuffled[:, half:] = shuffled[np.random.default_rng(seed).permutation(len(minutes)), half:]
    arrivals = second_arrivals(shuffled, seed + 2, BEGIN)
    rows = []
    for frozen in (False, True):
        trainer = FreezingTrainer(parameters)
        freeze_at = half * 60 if frozen else None
        forecasters = {"mix": Freezing(), "lstm": Freezing(mixed={"lstm": partial(Lstm, trainer=trainer)})}
        for name, forecaster in forecasters.items():
            at_tick = partial(freeze, forecaster, trainer, freeze_at)
            judged = replay(forecaster, arrivals, stride=EVERY, judged_from=half * 60.0, at_tick=at_tick)
            last = replace(judged, chances=judged.chances[:, :, -1:])
            rows += rows_of("drift", last, [name], horizons=range(len(HORIZONS_S)), of=last.unix > 0, frozen=frozen)
    return rows


def freeze(forecaster: Freezing, trainer: FreezingTrainer, at: int | None, tick: int) -> None:
    """Stops all learning from tick `at` on."""
    forecaster.frozen = trainer.frozen = at is not None and tick >= at


def windows(minutes: np.ndarray, scale: Scale, seed: int) -> list[Row]:
    """The last window, and the network without further training, by the length of a window; on functions held out."""
    forecaster = Forecaster(mixed={f"{window:g}": partial(LastWindow, window_s=window) for window in scale.windows_s})
    judged = replay(forecaster, second_arrivals(minutes[1::2], seed, BEGIN), stride=EVERY, judged_from=scale.warm_up_s)
    rows = []
    for number, window in enumerate(scale.windows_s):
        values = metrics(judged.chances[:, DECISIVE, number], judged.arrived[:, DECISIVE])
        rows.append({"kind": "window", "predictor": "last_window", "window_s": window, **values})
        lots = record(minutes, window, seed)
        parameters = train([pick(lot, 0) for lot in lots], scale.training_steps // 3, seed)
        tests = [pick(lot, 1) for lot in lots[len(lots) // 4 :]]
        odds = np.concatenate([first_odds(parameters, lot) for lot in tests])
        arrived = np.concatenate([lot.outcomes for lot in tests])[:, DECISIVE] > 0
        values = metrics(1 / (1 + np.exp(-odds[:, DECISIVE])), arrived)
        rows.append({"kind": "window", "predictor": "lstm", "window_s": window, **values})
    return rows


def pick(lot: Observations, half: int) -> Observations:
    """Returns the observations of the functions with even (0) or odd (1) numbers."""
    of = np.array([int(key) % 2 == half for key in lot.keys], bool)
    keys = [key for key, yes in zip(lot.keys, of.tolist(), strict=True) if yes]
    return Observations(keys, lot.windows[of], lot.moment[of], lot.outcomes[of])


def first_odds(parameters: Parameters, lot: Observations) -> np.ndarray:
    """Returns log odds for functions that are new to the network."""
    shared = np.repeat(parameters["embedding"][None], len(lot.keys), 0)
    return read_out(parameters, states(parameters, lot.windows, shared), lot.moment)


def cost(sizes: tuple[int, ...], seconds: int) -> list[Row]:
    """Returns processor time of a second, and memory with as many functions again that have left and are remembered.

    Each is measured in a separate process, which has no memory that another one has freed.
    """
    rows = list[Row]()
    for predictor in ("mix", "lstm"):
        for size in sizes:
            with get_context("fork").Pool(1) as pool:
                rows.append(pool.apply_async(cost_of, (predictor, size, seconds)).get(COST_TIMEOUT_S))
    return rows


def cost_of(predictor: str, size: int, seconds: int) -> Row:
    before, forecaster = resident_mb(), Forecaster(predictor)
    forecaster.observe(MONDAY, {f"tenant/early-{number}": 1 for number in range(size)})
    times = timed(forecaster, MONDAY + 7200.0, [f"tenant/function-{number}" for number in range(size)], seconds)
    return {
        "kind": "cost", "predictor": predictor, "functions": size, "ms": mean(times), "worst_ms": max(times),
        "mb": resident_mb() - before,
    }  # fmt: skip


def timed(forecaster: Forecaster, begin: float, keys: list[str], seconds: int) -> list[float]:
    """Milliseconds of each second, a whole window at least, after all of these functions have entered."""
    rng, times = np.random.default_rng(0), list[float]()
    forecaster.observe(begin, dict.fromkeys(keys, 1))
    for second in range(1, seconds + 2):
        called = {keys[number]: 1 for number in rng.integers(0, len(keys), len(keys) // CALLED_EVERY)}
        started = time.process_time()
        forecaster.observe(begin + second, called)
        forecaster.forecast(begin + second)
        times.append((time.process_time() - started) * 1e3)
    return times[1:]


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def figures_of(rows: list[Row]) -> dict[str, float]:
    def one(predictor: str, name: str, horizon: float, without: int) -> float:
        case = {"kind": "function", "predictor": predictor, "horizon_s": horizon, "without_top": without}
        return next(float(row[name]) for row in rows if case.items() <= row.items())

    figures = {"accuracy": one("mix", "accuracy", 30.0, 0), "ewma_accuracy": one("ewma", "accuracy", 30.0, 0)}
    figures["always_no_accuracy"] = one("mix", "always_no", 30.0, 0)
    for horizon in HORIZONS_S:
        best = min(one(name, "log_loss", horizon, 0) for name in PARTS)
        figures[f"mix_over_best_part_{horizon:g}s"] = one("mix", "log_loss", horizon, 0) / best
        figures[f"lstm_gain_{horizon:g}s"] = 1 - one("mix_with_lstm", "log_loss", horizon, 0) / one(
            "mix", "log_loss", horizon, 0
        )
    costs = [row for row in rows if row["kind"] == "cost" and row["predictor"] == "mix"]
    figures["predict_ms"] = max(row["ms"] / row["functions"] * 1000 for row in costs)
    figures["memory_mb"] = costs[-1]["mb"]
    return figures


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    scale, seed, begin = QUICK if options.quick else Scale(), options.seed, time.process_time()
    minutes = minute_counts()[: scale.functions]
    chosen_on, reported = minutes[0::2], minutes[1::2]
    rows = cost(scale.sizes, scale.timed_s)
    parameters = train(record(chosen_on[:, : scale.minutes], 30.0, seed), scale.training_steps, seed)
    held_out = reported[:, : scale.minutes]
    rows += functions_held_out(held_out, parameters, warm_up_s=scale.warm_up_s, seed=seed)
    rows += days_held_out(seed, scale.days)
    rows += drift(reported[:, : scale.short_minutes], parameters, seed)
    rows += windows(minutes[:, : scale.short_minutes], scale, seed)
    settings = {**asdict(scale), "functions": len(minutes), "cpu_s": round(time.process_time() - begin, 1)}
    publish(report("forecast", settings, options.seed, rows, figures_of(rows)), options.json)


if __name__ == "__main__":
    main()
