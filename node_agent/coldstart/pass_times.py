"""Times of whole cold passes on this node, by plan: forecasts corrected by measured passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import msgspec
import numpy as np

from adapters.base_model import PROJECTIONS
from cluster.least_squares import nonnegative
from node_agent.adapter_memory.layout import AdapterLayout

ROUNDS = 3
"""Measured passes of each plan that a kind of call needs before it may use CPU workers."""
MIN_PASS_S, MAX_PASS_S = 1e-6, 1e3
"""Least and greatest duration and forecast of a pass, in seconds. Samples outside are ignored."""
MAX_SAMPLES = 24
"""Maximum stored passes for each plan and kind of call; the oldest is dropped first."""
MIN_SPREAD = 0.02
"""Minimum distance of the lower and upper bounds from the likely pass time, as a share of it, since pass times vary."""
MAX_KINDS = 64
"""Maximum kinds of calls with stored passes; the least recently updated is dropped."""
NOTCH = 1.57
"""Half the width of a median's confidence interval, in units of interquartile range / sqrt(n). Medians whose intervals
do not overlap differ at about 95 % confidence (McGill, Tukey, Larsen 1978, notched box plots)."""
EXTRAPOLATED = 2.0
"""Multiple of the longest measured forecast of a kind of call. For forecasts beyond it, bounds are as wide as without a
measured pass."""
ANY_SPREAD = 0.3
"""Distance of the lower and upper bounds from the likely pass time, as a share of it, if no pass was measured."""


class CallKind(msgspec.Struct, frozen=True, array_like=True):
    """Kind of a cold call: the adapted projections, the adapter's largest rank and the number of tokens."""

    projections: tuple[int, ...]
    """ascending indices into PROJECTIONS"""
    rank: int
    """rounded to a power of two"""
    tokens: int
    """rounded to a power of two"""

    def __str__(self) -> str:
        names = ", ".join(PROJECTIONS[p].removesuffix("_proj") for p in self.projections)
        return f"rank {self.rank} on {names}, {self.tokens} tokens"


def kind_of(layout: AdapterLayout, tokens: int) -> CallKind:
    """Returns the kind of a chunk of `tokens` tokens with an adapter of this layout."""
    projections = tuple(np.flatnonzero(layout.rank.max(axis=0)).tolist())
    return CallKind(projections, _rounded(int(layout.rank.max(initial=1))), _rounded(tokens))


def _rounded(value: int) -> int:
    """Returns the nearest power of two by ratio."""
    return 1 << round(log2(max(1, value)))


class PassSample(msgspec.Struct, frozen=True, array_like=True):
    """Times of one measured pass, in seconds."""

    kind: CallKind
    plan: str
    forecast: float
    """forecast seconds by the profile alone"""
    seconds: float
    """measured duration, from planning to the end of the chunk"""
    first: float = 0.0
    """seconds from the start of a measured call to its first token; 0 for a chunk of a user's request"""
    answer: float = 0.0
    """seconds from the start of a measured call to the end of its answer; 0 for a chunk of a user's request"""
    calls: int = 1
    """number of concurrent calls, each with its own adapter; if several, `first` and `answer` are their means"""


def median_spread(values: Sequence[float]) -> float:
    """Returns half the width of the confidence interval of the median of `values`, as a share of the median."""
    quarter, middle, three_quarters = np.quantile(values, (0.25, 0.5, 0.75))
    return float(NOTCH * (three_quarters - quarter) / middle / len(values) ** 0.5)


class PassTimes:
    """Measured passes of cold calls, by kind of call and plan.

    For each plan it fits `seconds = fixed + slope * forecast` to the samples of all kinds. Each kind's deviation from
    this fit corrects the forecasts for that kind.
    """

    def __init__(self, samples: Sequence[PassSample] = ()) -> None:
        self._samples: dict[CallKind, dict[str, list[PassSample]]] = {}
        self._fits: dict[str, tuple[float, float]] = {}
        self._bursts: dict[tuple[CallKind, str], list[PassSample]] = {}
        for sample in samples:
            self.add(sample)

    @property
    def samples(self) -> tuple[PassSample, ...]:
        """Returns all stored samples."""
        alone = (sample for plans in self._samples.values() for each in plans.values() for sample in each)
        return (*alone, *(sample for each in self._bursts.values() for sample in each))

    def add(self, sample: PassSample) -> None:
        """Adds a pass. Ignores it if its duration or forecast is outside MIN_PASS_S to MAX_PASS_S."""
        if not MIN_PASS_S < sample.seconds < MAX_PASS_S:
            return
        if sample.calls > 1:
            before = self._bursts.get((sample.kind, sample.plan), [])
            self._bursts[sample.kind, sample.plan] = [*before, sample][-MAX_SAMPLES:]
            return
        if not MIN_PASS_S < sample.forecast < MAX_PASS_S:
            return
        plans = self._samples.pop(sample.kind, {})
        plans[sample.plan] = [*plans.get(sample.plan, ()), sample][-MAX_SAMPLES:]
        self._samples[sample.kind] = plans
        while len(self._samples) > MAX_KINDS:
            del self._samples[next(iter(self._samples))]
        self._fits.pop(sample.plan, None)

    def forget(self, plan: str) -> None:
        """Drops the samples of a plan, since the workers they were measured with have changed."""
        for plans in self._samples.values():
            plans.pop(plan, None)
        self._fits.pop(plan, None)
        self._bursts = {key: each for key, each in self._bursts.items() if key[1] != plan}

    def of(self, kind: CallKind, plan: str) -> list[PassSample]:
        """Returns the samples of a kind of call and plan, latest last."""
        return list(self._samples.get(kind, {}).get(plan, ()))

    def burst(self, kind: CallKind, plan: str) -> list[PassSample]:
        """Returns the samples of this kind and plan that were measured with several concurrent calls."""
        return list(self._bursts.get((kind, plan), ()))

    def may_narrow(self, kind: CallKind, plan: str) -> bool:
        """Returns whether further passes would narrow the bounds: fewer than MAX_SAMPLES are stored."""
        return len(self.of(kind, plan)) < MAX_SAMPLES

    def is_measured(self, kind: CallKind, plans: Sequence[str] = ("pipeline", "assist")) -> bool:
        """Returns whether ROUNDS passes of each plan are stored for this kind of call."""
        return all(len(self.of(kind, plan)) >= ROUNDS for plan in plans)

    def answers(self, kind: CallKind, plan: str) -> list[PassSample]:
        """Returns the samples of this kind and plan that were measured up to the end of an answer. Chunks of users'
        requests were not."""
        return [sample for sample in self.of(kind, plan) if sample.answer]

    def bounds(self, kind: CallKind, plan: str, forecast: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the lower bounds, likely values and upper bounds of pass durations, in seconds. `forecast`: seconds
        of the same passes by the profile alone."""
        if plan == "wait" and not self.of(kind, plan):
            plan = "pipeline"  # waiting calls are not timed when served, but their computation is the same
        ratios = self._ratios(kind, plan)
        middle = float(np.median(ratios)) if ratios else 1.0
        likely = middle * self._by_fit(plan, forecast)
        if not ratios:
            return (1 - ANY_SPREAD) * likely, likely, (1 + ANY_SPREAD) * likely
        spread = max(MIN_SPREAD, median_spread(ratios))
        measured = max(sample.forecast for sample in self.of(kind, plan))
        spreads = np.where(forecast > EXTRAPOLATED * measured, max(spread, ANY_SPREAD), spread)
        return (1 - spreads) * likely, likely, (1 + spreads) * likely

    def _ratios(self, kind: CallKind, plan: str) -> list[float]:
        """Returns measured seconds / fitted seconds of the kind's samples."""
        return [s.seconds / float(self._by_fit(plan, np.array(s.forecast))) for s in self.of(kind, plan)]

    def _by_fit(self, plan: str, forecast: np.ndarray) -> np.ndarray:
        if plan not in self._fits:  # fitted lazily, since many samples may be added before a fit is needed
            self._fits[plan] = self._fit(plan)
        fixed, slope = self._fits[plan]
        return fixed + slope * forecast

    def _fit(self, plan: str) -> tuple[float, float]:
        """Returns (fixed seconds, slope) of a plan by least squares of relative errors. With one measured kind of call
        only the slope is fitted; with none the result is (0, 1)."""
        kinds = [plans[plan] for plans in self._samples.values() if plans.get(plan)]
        points = np.array([(np.median([s.forecast for s in k]), np.median([s.seconds for s in k])) for k in kinds])
        if not kinds:
            return 0.0, 1.0
        if len(kinds) < 2:
            return 0.0, float(points[0, 1] / points[0, 0])
        columns = np.column_stack((np.ones(len(points)), points[:, 0]))
        fixed, slope = nonnegative(columns / points[:, 1:], np.ones(len(points)))
        return (float(fixed), float(slope)) if slope > 0 else (0.0, float(np.median(points[:, 1] / points[:, 0])))
