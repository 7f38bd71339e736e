"""From what a trace states to its requests: what it does not state is drawn, with a seed."""

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
class Laws:
    """What one reading of a trace takes of it, and how what it does not tell is drawn."""

    seed: int = 0
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """of functions, in turn, by a drawn order"""
    functions: int | None = None
    """MAF: as many, each with the counts of a function drawn from the trace. Traces that name no functions: as many,
    called by Zipf's law with exponent 1; 100 by default."""
    rate: float | None = None
    """Mean requests/s. Counts are multiplied (and drawn from Poisson's law), times of single requests are stretched."""
    seconds: float | None = None
    """Only requests before this"""
    mean_output: int = MEAN_OUTPUT
    skip_top: int = 0
    """MAF: without so many of the busiest functions"""
    half: int | None = None
    """MAF: only every second function by calls, from the busiest (0) or the next one (1) on, so that what was chosen
    on one half can be shown on the other"""
    shifted: bool = False
    """MAF: each of `functions` begins at a minute of the trace that is drawn for it: functions with the same counts
    don't burst in the same minute"""


def rank_of(laws: Laws, functions: int) -> np.ndarray:
    """Returns the rank of each function (i64[functions]): every rank equally often, in an order that is drawn."""
    order = np.random.default_rng((laws.seed, 1)).permutation(functions)
    return np.asarray(laws.ranks, np.int64)[order % len(laws.ranks)]


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
    """Returns the functions that n requests call (i64[n]); the k-th is called in proportion to 1/k."""
    weight = 1 / np.arange(1, functions + 1)
    return rng.choice(functions, n, p=weight / weight.sum())


class Singles:
    """Requests that a trace tells one by one, 24 bytes each."""

    def __init__(self) -> None:
        self._times, self._prompts, self._outputs = array("d"), array("q"), array("q")

    def add(self, line: Line, seconds: float, prompt: int, output: int) -> None:
        """Adds a request; one without prompt or without output tokens counts as having one. Raises TraceError for more
        than MAX_REQUESTS."""
        if len(self._times) == MAX_REQUESTS:
            raise line.error(0, f"more than {MAX_REQUESTS} requests")
        self._times.append(seconds)
        self._prompts.append(max(1, prompt))
        self._outputs.append(max(1, output))

    def requests(self, laws: Laws) -> list[TraceRequest]:
        """Returns the requests; functions, which the trace does not name, are drawn."""
        times = np.array(self._times)
        order, times = arrivals(times - times.min(initial=np.inf), laws, laws.rate)
        count = laws.functions or DEFAULT_FUNCTIONS
        called = zipf(len(times), count, np.random.default_rng((laws.seed, 2)))
        prompts, outputs = np.array(self._prompts)[order], np.array(self._outputs)[order]
        return rows(times, called, np.zeros(count, np.int64), prompts, outputs, laws)


def arrivals(times: np.ndarray, laws: Laws, rate: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the order of those requests that are taken (i64[n]) and their times (f64[n], seconds, ascending):
    stretched to the mean `rate` if one is given, and cut after `laws.seconds`."""
    order = np.argsort(times, kind="stable")
    times = times[order]
    if rate is not None and len(times) and times[-1] > 0:
        times = times * (len(times) / times[-1] / rate)
    if laws.seconds is not None:
        times = times[times < laws.seconds]
    return order[: len(times)], times


def rows(
    times: np.ndarray, called: np.ndarray, owners: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, laws: Laws
) -> list[TraceRequest]:
    """Returns the requests that the columns hold, with ranks drawn by `laws`. `times` ascend; `called` i64[n]:
    functions; `owners` i64[functions]: tenants."""
    ranks, names = rank_of(laws, len(owners)).tolist(), [f"f{i}" for i in range(len(owners))]
    tenants = [f"t{owner}" for owner in owners.tolist()]
    return [
        TraceRequest(at, names[f], ranks[f], prompt, output, tenants[f])
        for at, f, prompt, output in zip(
            times.tolist(), called.tolist(), prompts.tolist(), outputs.tolist(), strict=True
        )
    ]
