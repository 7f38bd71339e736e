"""Keeps a performance model true while its node serves: forecasts of hot passes against what they took.

Costs of decode steps and of prompt passes have a factor each, which follows the median of observed / forecast in small
steps and between bounds: a burst of disturbed passes moves it little, a lasting change wholly. Beyond the bounds the
host is not what was measured, and only a new measurement helps; the published ratio says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TypeVar

from msgspec.structs import replace

from cluster.performance_fit import decode_forecast
from cluster.performance_model import DecodeModel, PerformanceModel, PrefillModel
from node_agent.engine.batch import Row
from node_agent.performance.terms import decode_sample, prefill_sample

MEMORY = 64
"""Passes of each kind that count."""
EVERY = 16
"""Passes between two steps of a factor."""
STEP = 1.05
BOUND = 2.0
"""A factor lies between its inverse and it."""
WORTH = 0.02
"""A factor that is off by no more stays: records change, and schedulers look again, only where it matters."""

T = TypeVar("T", DecodeModel, PrefillModel)

log = logging.getLogger("garnish.engine")


class Factor:
    """Factor by which one kind of pass takes longer than its forecast."""

    def __init__(self) -> None:
        self.value = 1.0
        self._ratios: deque[float] = deque(maxlen=MEMORY)
        self._since_step = 0

    def observe(self, forecast: float, seconds: float) -> bool:
        """Takes in a pass that took `seconds`. `forecast`: its seconds without any factor. Returns whether the factor
        has changed."""
        if not (forecast > 0 and 0 < seconds < float("inf")):
            return False
        self._ratios.append(seconds / forecast)
        self._since_step += 1
        if self._since_step < EVERY:
            return False
        self._since_step = 0
        target = min(BOUND, max(1 / BOUND, median(self._ratios)))
        if abs(target / self.value - 1) <= WORTH:
            return False
        self.value *= min(STEP, max(1 / STEP, target / self.value))
        return True

    def ratios(self) -> list[float]:
        """Returns observed / forecast of the remembered passes, where forecast includes the factor as it is now."""
        return [ratio / self.value for ratio in self._ratios]


class Drift:
    """Follows how far passes are from the measured model. Called by the engine's thread alone, once a hot pass."""

    def __init__(self, measured: PerformanceModel) -> None:
        self.measured = self.published = measured
        self.decode, self.prefill = Factor(), Factor()
        self.both = Factor()
        """Factor of passes over decode rows and prompts together, by the model as published; not part of it."""

    def observe(self, rows: Sequence[Row], n_decode: int, seconds: float) -> None:
        """Takes in a pass that is about to be booked. One of both kinds teaches nothing of either: the two share what
        each begins with."""
        if 0 < n_decode < len(rows):
            self.both.observe(_together(self.published, rows[:n_decode], rows[n_decode:]), seconds)
            return
        if n_decode:
            sample = decode_sample(rows, seconds)
            forecast = decode_forecast(self.measured.decode, sample)
            changed = self.decode.observe(forecast, seconds)
        else:
            prompts = prefill_sample(rows, seconds)
            forecast = self.measured.prefill.seconds(prompts.tokens, prompts.squares, prompts.token_ranks)
            changed = self.prefill.observe(forecast, seconds)
        if changed:
            self.published = corrected(self.measured, self.decode.value, self.prefill.value)
            log.info("forecasts corrected", extra={"decode": self.decode.value, "prefill": self.prefill.value})

    @property
    def forecast_ratio(self) -> float | None:
        """The median of observed / forecast over the last passes, by the model as it is published; None when none were
        seen."""
        ratios = [*self.decode.ratios(), *self.prefill.ratios()]
        return round(median(ratios), 4) if ratios else None


def _together(model: PerformanceModel, decoding: Sequence[Row], prompts: Sequence[Row]) -> float:
    """Returns the forecast seconds of a pass of both kinds: what it begins with counts once."""
    prompt = prefill_sample(prompts, 0.0)
    decode = decode_forecast(model.decode, decode_sample(decoding, 0.0))
    return decode + model.prefill.seconds(prompt.tokens, prompt.squares, prompt.token_ranks) - model.prefill.base


def corrected(model: PerformanceModel, decode: float, prefill: float) -> PerformanceModel:
    """Returns the model with the costs of decode steps and of prompt passes multiplied."""
    return replace(
        model,
        decode=_times(model.decode, decode, "base", "per_row", "per_context", "per_rank"),
        prefill=_times(model.prefill, prefill, "base", "per_token", "per_token2", "per_token_rank"),
    )


def _times(costs: T, factor: float, *names: str) -> T:
    """Returns the costs, of which those of these names are multiplied."""
    return replace(costs, **{name: getattr(costs, name) * factor for name in names})
