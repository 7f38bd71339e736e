"""Corrects a performance model while its node serves, by comparing forecasts of hot passes with their measured times.

Costs of decode steps and of prompt passes have one factor each. A factor follows the median of measured / forecast in
small steps within bounds: a burst of disturbed passes moves it little, a lasting change completely. Beyond the bounds,
the host no longer matches the measurement and needs a new one; the published ratio shows this.
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
from node_agent.engine.rows import Row
from node_agent.performance.terms import decode_sample, prefill_sample

MEMORY = 64
"""Number of recent passes of each kind that are taken into account."""
EVERY = 16
"""Number of passes between two steps of a factor."""
STEP = 1.05
BOUND = 2.0
"""Maximum of a factor; its minimum is 1 / BOUND."""
WORTH = 0.02
"""Relative error of a factor up to which it is left unchanged, so that the node's record changes only when it
matters."""

T = TypeVar("T", DecodeModel, PrefillModel)

log = logging.getLogger("garnish.engine")


class Factor:
    """Ratio of measured to forecast time of one kind of pass."""

    def __init__(self) -> None:
        self.value = 1.0
        self._ratios: deque[float] = deque(maxlen=MEMORY)
        self._since_step = 0

    def observe(self, forecast: float, seconds: float) -> bool:
        """Adds a pass that took `seconds`, and returns whether the factor has changed. `forecast`: seconds without the
        factor."""
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
        """Returns measured / forecast seconds of each recent pass. The forecasts are corrected by the present
        factor."""
        return [ratio / self.value for ratio in self._ratios]


class Drift:
    """Tracks how far passes differ from the measured model. The engine's thread calls it once per hot pass."""

    def __init__(self, measured: PerformanceModel) -> None:
        self.measured = self.published = measured
        self.decode, self.prefill = Factor(), Factor()
        self.both = Factor()
        """Ratio of measured to forecast time of passes with both decode rows and prompts. It is relative to the
        published model and no part of it."""

    def observe(self, rows: Sequence[Row], n_decode: int, seconds: float) -> None:
        """Adds a finished pass. A mixed pass only updates `both`, since its fixed cost can't be divided between the two
        kinds."""
        if 0 < n_decode < len(rows):
            self.both.observe(_together(self.published, rows[:n_decode], rows[n_decode:]), seconds)
            return
        if n_decode:
            sample = decode_sample(rows, seconds, self.measured.decode.padded_rank)
            forecast = decode_forecast(self.measured.decode, sample)
            changed = self.decode.observe(forecast, seconds)
        else:
            prompts = prefill_sample(rows, seconds, self.measured.prefill.padded_rank)
            forecast = self.measured.prefill.seconds(prompts.tokens, prompts.squares, prompts.token_ranks)
            changed = self.prefill.observe(forecast, seconds)
        if changed:
            self.published = corrected(self.measured, self.decode.value, self.prefill.value)
            log.info("forecasts corrected", extra={"decode": self.decode.value, "prefill": self.prefill.value})

    @property
    def forecast_ratio(self) -> float | None:
        """Returns the median of measured / forecast seconds over recent passes, by the published model. Returns None
        without passes."""
        ratios = [*self.decode.ratios(), *self.prefill.ratios()]
        return round(median(ratios), 4) if ratios else None


def _together(model: PerformanceModel, decoding: Sequence[Row], prompts: Sequence[Row]) -> float:
    """Returns the forecast seconds of a mixed pass. The fixed cost of a pass counts once."""
    prompt = prefill_sample(prompts, 0.0, model.prefill.padded_rank)
    decode = decode_forecast(model.decode, decode_sample(decoding, 0.0, model.decode.padded_rank))
    return decode + model.prefill.seconds(prompt.tokens, prompt.squares, prompt.token_ranks) - model.prefill.base


def corrected(model: PerformanceModel, decode: float, prefill: float) -> PerformanceModel:
    """Returns the model with the costs of decode steps and of prompt passes multiplied by these factors."""
    return replace(
        model,
        decode=_times(model.decode, decode, "base", "per_row", "per_context", "per_rank"),
        prefill=_times(model.prefill, prefill, "base", "per_token", "per_token2", "per_token_rank"),
    )


def _times(costs: T, factor: float, *names: str) -> T:
    """Returns the costs with the named fields multiplied by the factor."""
    return replace(costs, **{name: getattr(costs, name) * factor for name in names})
