"""Predictor that runs an LSTM network over the numbers of each function's calls in its last STEPS windows of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.forecast.chances import HORIZONS_S
from cluster.forecast.lstm_cells import FEATURES, MOMENT, UNITS, draw_parameters, read_out, states
from cluster.forecast.lstm_training import UPDATE_EVERY, Observations, Trainer, TrainerLike, embedding_of
from cluster.forecast.outcomes import TOLERANCE_S
from cluster.forecast.predictor import Second
from cluster.forecast.table import Array, FunctionTable

WINDOW_S = 30.0
STEPS = 10
"""Number of ended windows that the network reads; a window is a fixed time in which calls are counted."""
OBSERVE_EVERY_S = 5.0
OBSERVED = 32
"""Number of functions drawn at random every OBSERVE_EVERY_S as training observations."""
CHUNK = 4096
"""Number of functions in one forward pass, which bounds memory."""
MEMORY_S = 1800.0
"""Time in which the weight of a call falls to 1/e in the mean rate, an input of the readout."""


@dataclass
class _Waiting:
    """Observations made at one time that wait for their outcomes."""

    at: float
    lot: Observations
    horizon: int = 0
    """Index into HORIZONS_S of the next horizon that ends."""


class Lstm:
    """Predictor that runs the LSTM network over the last STEPS windows of every function. The network runs each time a
    window ends, and its readout runs at each forecast."""

    def __init__(self, table: FunctionTable, trainer: TrainerLike | None = None, window_s: float = WINDOW_S) -> None:
        """Creates a predictor with this `trainer`, or with a new one of random parameters."""
        self._table, self._window_s = table, window_s
        self._trainer: TrainerLike = trainer or Trainer(draw_parameters(np.random.default_rng(0)))
        self._counts = table.column((STEPS + 1,))
        """Number of calls f32[functions, STEPS + 1] in each of the last STEPS windows and, last, in the current one."""
        self._state = table.column((UNITS,))
        self._rate = table.column()
        self._begin: float | None = None
        self._observed_at = -np.inf
        self._waiting: list[_Waiting] = []
        self._rng = np.random.default_rng(0)
        self._requests = 0
        self._new_state = np.zeros(UNITS, np.float32)
        """Network state of an entering function, f32[UNITS]."""
        self._refresh()
        table.entered.append(self._enter)

    def observe(self, second: Second) -> None:
        if self._begin is None:
            self._begin = second.now - second.elapsed
        if (over := int((second.now - second.elapsed - self._begin) // self._window_s)) > 0:
            self._shift(over)
            self._begin += over * self._window_s
            self._refresh()
        self._counts.live[second.rows, -1] += second.counts
        self._rate.live[:] *= np.float32(np.exp(-second.elapsed / MEMORY_S))
        self._rate.live[second.rows] += second.counts
        self._requests += int(second.counts.sum())
        self._resolve(second.now)
        self._take(second.now)
        if self._requests >= UPDATE_EVERY:
            self._trainer.update()
            self._requests %= UPDATE_EVERY

    def chances(self, now: float) -> Array:
        odds = read_out(self._trainer.parameters, self._state.live, self._moment(now, slice(None)))
        chances: Array = 0.5 + 0.5 * np.tanh(0.5 * odds)
        return chances

    def _shift(self, windows: int) -> None:
        """Starts a new window for each of the `windows` that have ended."""
        for _ in range(min(windows, STEPS + 1)):
            self._counts.live[:, :-1] = self._counts.live[:, 1:].copy()
            self._counts.live[:, -1] = 0

    def _refresh(self) -> None:
        """Runs the network over the last STEPS windows of every function."""
        parameters = self._trainer.parameters
        none = np.zeros((1, STEPS, FEATURES), np.float32)
        self._new_state = states(parameters, none, parameters["embedding"][None])[0]
        for begin in range(0, len(self._table), CHUNK):
            rows = slice(begin, begin + CHUNK)
            embeddings = embedding_of(self._trainer, self._table.keys[rows])
            self._state.live[rows] = states(parameters, self._windows(rows), embeddings)

    def _enter(self, keys: list[str], first_row: int) -> None:
        self._state.live[first_row : first_row + len(keys)] = self._new_state

    def _windows(self, rows: slice | Array) -> Array:
        """Returns the features of the last STEPS windows, f32[functions, STEPS, FEATURES]."""
        counts = self._counts.live[rows, :-1]
        return np.stack([np.log1p(counts), (counts > 0).astype(np.float32)], axis=2)

    def _moment(self, now: float, rows: slice | Array) -> Array:
        """Returns the readout's inputs at time `now`, f32[functions, MOMENT], each about 0 to 1. They are the logarithm
        of the time since the last call, whether the current window has a call, the elapsed fraction of that window, and
        the logarithm of the mean rate."""
        idle = np.log1p(np.maximum(0.0, now - self._table.last_call.live[rows])) / np.log1p(MEMORY_S)
        over = 0.0 if self._begin is None else (now - self._begin) / self._window_s
        moment = np.empty((len(idle), MOMENT), np.float32)
        moment[:, 0] = idle
        moment[:, 1] = self._counts.live[rows, -1] > 0
        moment[:, 2] = min(1.0, over)
        moment[:, 3] = np.log1p(self._rate.live[rows]) / 10
        return moment

    def _take(self, now: float) -> None:
        if now - self._observed_at < OBSERVE_EVERY_S - TOLERANCE_S or not len(self._table):
            return
        self._observed_at = now
        rows = self._rng.choice(len(self._table), min(OBSERVED, len(self._table)), replace=False)
        keys = [self._table.keys[row] for row in rows.tolist()]
        outcomes = np.zeros((len(rows), len(HORIZONS_S)), np.float32)
        self._waiting.append(_Waiting(now, Observations(keys, self._windows(rows), self._moment(now, rows), outcomes)))

    def _resolve(self, now: float) -> None:
        """Adds outcomes to the waiting observations. Observations whose horizon ended too long ago are dropped."""
        waiting_still = list[_Waiting]()
        for waiting in self._waiting:
            late = now - waiting.at - HORIZONS_S[waiting.horizon]
            if late >= -TOLERANCE_S:
                last = self._table.last_calls(waiting.lot.keys)
                waiting.lot.outcomes[:, waiting.horizon] = last > waiting.at
                waiting.horizon += 1
            if late > TOLERANCE_S:
                continue
            if waiting.horizon == len(HORIZONS_S):
                self._trainer.add(waiting.lot)
            else:
                waiting_still.append(waiting)
        self._waiting = waiting_still
