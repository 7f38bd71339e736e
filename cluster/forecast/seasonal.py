"""Predictor based on the hour of the day and the day of the week, in UTC."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.forecast.predictor import Second, chances_of_rate
from cluster.forecast.table import Array, FunctionTable

DAY_S = 86_400.0
MONDAY_S = 4 * DAY_S
"""Unix time of the first Monday after the epoch, in seconds."""
SHRINKAGE = 4.0
"""Number of prior calls with which each slot's share is pulled towards the average. With few calls an hour thus counts
as an average one."""
MAX_REMEMBERED = 40_000
"""Maximum number of functions remembered after they left the table; the first to leave is dropped first."""


@dataclass(frozen=True)
class Season:
    """Repeating period (day or week), divided into equal slots."""

    begin_s: float
    slots: int
    slot_s: float
    fading: float
    """Factor by which each period multiplies the weight of earlier ones."""

    @property
    def period_s(self) -> float:
        """Length of the period in seconds."""
        return self.slots * self.slot_s

    def place(self, unix: Array | float) -> tuple[Array, Array]:
        """Returns the number of the period at Unix time `unix`, and the seconds since it began."""
        number, offset = np.divmod(np.asarray(unix, np.float64) - self.begin_s, self.period_s)
        return number, offset

    def exposure(self, born: Array, unix: float) -> tuple[int, Array]:
        """Returns the slot at Unix time `unix`, and the functions' exposure to it. The exposure is the weighted seconds
        that functions first called at `born` (Unix time) have spent in that slot."""
        period, offset = self.place(unix)
        slot = int(offset // self.slot_s)
        born_period, born_offset = self.place(np.minimum(born, unix))
        periods = period - born_period
        first = np.clip((slot + 1) * self.slot_s - born_offset, 0.0, self.slot_s)
        faded = self.fading**periods
        earlier = (self.fading - faded) / (1 - self.fading) * self.slot_s + faded * first
        began = np.maximum(unix - offset + slot * self.slot_s, born)
        return slot, np.where(periods > 0, earlier, 0.0) + np.maximum(0.0, unix - began)


SEASONS = (Season(0.0, 24, 3600.0, 0.8), Season(MONDAY_S, 7, DAY_S, 0.8), Season(0.0, 1, DAY_S, 0.8))
"""Seasons used: hours of the day, days of the week, and whole days, which give the average rate."""


class Seasonal:
    """Expects a function's average rate, multiplied by the usual factors of the current hour and weekday."""

    def __init__(self, table: FunctionTable) -> None:
        self._calls = [table.column((season.slots,)) for season in SEASONS]
        self._born, self._touched = table.column(dtype=np.float64), table.column(dtype=np.float64)
        self._remembered: dict[str, tuple[float, float, list[bytes]]] = {}
        self._unix = self._now = 0.0
        table.entered.append(self._recall)
        table.leaving.append(self._remember)

    def observe(self, second: Second) -> None:
        self._unix, self._now = second.unix, second.now
        rows = second.rows
        self._born.live[rows] = np.where(self._born.live[rows], self._born.live[rows], second.unix - 1)
        for season, calls in zip(SEASONS, self._calls, strict=True):
            period, offset = season.place(second.unix)
            passed = np.maximum(0.0, period - season.place(self._touched.live[rows])[0])
            calls.live[rows] *= (season.fading**passed)[:, None].astype(np.float32)
            calls.live[rows, int(offset // season.slot_s)] += second.counts
        self._touched.live[rows] = second.unix

    def chances(self, now: float) -> Array:
        unix = self._unix + now - self._now
        usual = self._in_slot(2, unix)
        rate = usual[0] / np.maximum(usual[1], 1.0)
        relative = np.ones_like(rate)
        for season in (0, 1):
            calls, exposure = self._in_slot(season, unix)
            relative *= (calls + SHRINKAGE) / (rate * exposure + SHRINKAGE)
        return chances_of_rate((rate * relative).astype(np.float32))

    def _in_slot(self, season: int, unix: float) -> tuple[Array, Array]:
        """Returns the weighted calls and weighted seconds of every function in the slot at `unix`. `season` is an index
        into SEASONS."""
        of = SEASONS[season]
        slot, exposure = of.exposure(self._born.live, unix)
        passed = np.maximum(0.0, of.place(unix)[0] - of.place(self._touched.live)[0])
        return self._calls[season].live[:, slot] * of.fading**passed, exposure

    def _remember(self, keys: list[str], rows: Array) -> None:
        for key, row in zip(keys, rows.tolist(), strict=True):
            calls = [column.live[row].tobytes() for column in self._calls]
            self._remembered[key] = (float(self._born.live[row]), float(self._touched.live[row]), calls)
        while len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]

    def _recall(self, keys: list[str], first_row: int) -> None:
        for row, key in enumerate(keys, first_row):
            if remembered := self._remembered.pop(key, None):
                self._born.live[row], self._touched.live[row], calls = remembered
                for column, stored in zip(self._calls, calls, strict=True):
                    column.live[row] = np.frombuffer(stored, np.float32)
