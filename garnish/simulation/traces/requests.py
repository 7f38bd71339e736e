"""Builds the requests of a trace; values that it does not state are drawn, with a seed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import log

import numpy as np

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.lines import Line

MEAN_OUTPUT = 128
MAX_REQUESTS = 20_000_000
DEFAULT_FUNCTIONS = 100


@dataclass(frozen=True)
class TraceOptions:
    """Options of reading a trace: the part that is taken, and the distributions of values that it does not state."""

    seed: int = 0
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """ranks of functions, assigned in turn by a drawn order"""
    functions: int | None = None
    """number of functions

    MAF: each has the counts of a function drawn from the trace. Traces that name no functions: calls follow Zipf's law
    with exponent 1; the default is 100.
    """
    rate: float | None = None
    """mean requests/s; counts are scaled and drawn from Poisson's law, times of single requests are stretched"""
    seconds: float | None = None
    mean_output: int = MEAN_OUTPUT
    skip_top: int = 0
    half: int | None = None
    """MAF: every second function by calls, from the busiest (0) or the next one (1)

    A choice made on one half can be evaluated on the other.
    """
    shifted: bool = False
    """MAF: each of `functions` starts at its own drawn minute of the trace, so that equal functions burst apart"""


def rank_of(options: TraceOptions, functions: int) -> np.ndarray:
    """Returns the rank of each function (i64[functions]): all ranks equally often, in a drawn order."""
    order = np.random.default_rng((options.seed, 1)).permutation(functions)
    return np.asarray(options.ranks, np.int64)[order % len(options.ranks)]


def chat_prompts(n: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n lengths of prompts (i64[n]): log-normal with 90 % at most 256 tokens and 99 % at most 1,024; cut at
    2,048."""
    low, high = 1.2815515655, 2.3263478740  # the normal quantiles of 0.9 and 0.99
    sigma = log(1024 / 256) / (high - low)
    drawn = np.rint(rng.lognormal(log(256) - low * sigma, sigma, n))
    return np.clip(drawn, 1, 2048).astype(np.int64)


def outputs(n: int, mean: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n lengths of answers (i64[n]): geometric, cut at four times the mean."""
    return np.minimum(rng.geometric(1 / mean, n), 4 * mean).astype(np.int64)


def zipf(n: int, functions: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the functions of n requests (i64[n]); the k-th is called in proportion to 1/k."""
    weight = 1 / np.arange(1, functions + 1)
    return rng.choice(functions, n, p=weight / weight.sum())


class Singles:
    """Requests that a trace states one by one, 24 bytes each."""

    def __init__(self) -> None:
        self._times, self._prompts, self._outputs = array("d"), array("q"), array("q")

    def add(self, line: Line, seconds: float, prompt: int, output: int) -> None:
        """Adds a request with at least one prompt and one output token. Raises TraceError beyond MAX_REQUESTS."""
        if len(self._times) == MAX_REQUESTS:
            raise line.error(0, f"more than {MAX_REQUESTS} requests")
        self._times.append(seconds)
        self._prompts.append(max(1, prompt))
        self._outputs.append(max(1, output))

    def requests(self, options: TraceOptions) -> list[TraceRequest]:
        """Returns the requests; functions, which the trace does not name, are drawn."""
        times = np.array(self._times)
        order, times = arrivals(times - times.min(initial=np.inf), options, options.rate)
        count = options.functions or DEFAULT_FUNCTIONS
        called = zipf(len(times), count, np.random.default_rng((options.seed, 2)))
        prompts, outputs = np.array(self._prompts)[order], np.array(self._outputs)[order]
        return rows(times, called, np.zeros(count, np.int64), prompts, outputs, options)


def arrivals(times: np.ndarray, options: TraceOptions, rate: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices (i64[n]) and times (f64[n], seconds, ascending) of the requests that are taken.

    Times are stretched to the mean `rate` if one is given, and cut after `options.seconds`.
    """
    order = np.argsort(times, kind="stable")
    times = times[order]
    if rate is not None and len(times) and times[-1] > 0:
        times = times * (len(times) / times[-1] / rate)
    if options.seconds is not None:
        times = times[times < options.seconds]
    return order[: len(times)], times


def rows(
    times: np.ndarray,
    called: np.ndarray,
    owners: np.ndarray,
    prompts: np.ndarray,
    outputs: np.ndarray,
    options: TraceOptions,
) -> list[TraceRequest]:
    """Returns the requests in the columns, with drawn ranks.

    `times` ascend. `called` i64[n] has functions, `owners` i64[functions] has tenants.
    """
    ranks, names = rank_of(options, len(owners)).tolist(), [f"f{i}" for i in range(len(owners))]
    tenants = [f"t{owner}" for owner in owners.tolist()]
    return [
        TraceRequest(at, names[f], ranks[f], prompt, output, tenants[f])
        for at, f, prompt, output in zip(
            times.tolist(), called.tolist(), prompts.tolist(), outputs.tolist(), strict=True
        )
    ]
