"""A stretch of the trace: which adapter is called with which prompt, and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.common.invoke import PROMPTS
from benchmarks.common.trace import minute_counts

WITHOUT_TOP = 10
"""Busiest functions of the trace that are left out: they make nine tenths of its calls."""


@dataclass(frozen=True)
class Arrival:
    at: float
    """time in units of the mean gap between calls"""
    adapter: int
    prompt: int


@dataclass(frozen=True)
class Window:
    """A stretch of the trace."""

    arrivals: list[Arrival]
    seconds: float


def draw_window(adapters: int, calls: int, seed: int) -> Window:
    """The first `calls` calls behind a drawn minute of the trace, without its busiest functions.

    Adapters are functions drawn at random; those beyond the trace's functions repeat them, shifted in time by a drawn
    number of minutes. Within its minute each call's time is drawn uniformly.
    """
    rng = np.random.default_rng([seed, adapters])
    counts = minute_counts(without_top=WITHOUT_TOP)
    functions, minutes = counts.shape
    chosen = np.concatenate([rng.permutation(functions) for _ in range(-(-adapters // functions))])[:adapters]
    shifts = np.where(np.arange(adapters) < functions, 0, rng.integers(1, minutes, adapters))
    begin = int(rng.integers(minutes))
    column = (np.arange(minutes)[None, :] + begin + shifts[:, None]) % minutes
    window = counts[chosen[:, None], column]
    until = int(np.searchsorted(window.sum(axis=0).cumsum(), calls)) + 1
    adapter, minute = np.nonzero(window[:, :until])
    times = window[adapter, minute]
    adapter, minute = np.repeat(adapter, times), np.repeat(minute, times)
    at = minute + rng.random(len(minute))
    order = np.argsort(at)[:calls]
    if len(order) < calls:
        raise ValueError(f"{adapters} functions have {len(order)} calls in the whole trace, not {calls}")
    span = float(at[order[-1]])
    prompts = rng.integers(PROMPTS, size=calls)
    arrivals = [
        Arrival(float(at[i]) / span * calls, int(adapter[i]), int(prompt))
        for i, prompt in zip(order, prompts, strict=True)
    ]
    return Window(arrivals, span * 60)
