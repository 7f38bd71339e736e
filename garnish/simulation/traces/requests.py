"""Builds the requests of a trace. Values that the trace does not state are drawn with a seed."""

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
    """Options for reading a trace: the part to use, and the distributions of values that the trace does not state.

    Notes with MAF apply only to Azure Functions 2019 traces.
    """

    seed: int = 0
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """ranks of functions; all are assigned equally often, in a random order"""
    functions: int | None = None
    """number of functions among which the requests are divided; without effect on ServeGen and Garnish traces

    MAF: each function takes the calls per minute of a randomly drawn function of the trace. None takes every function
    of the trace once. Traces without functions (Azure LLM, Mooncake): the function of each request is drawn by Zipf's
    law with exponent 1. None means 100 functions.
    """
    rate: float | None = None
    """mean requests/s to which the trace is scaled; None keeps its rate

    MAF: counts per minute are scaled and then drawn from a Poisson distribution. Other traces: times are stretched.
    """
    seconds: float | None = None
    mean_output: int = MEAN_OUTPUT
    skip_top: int = 0
    half: int | None = None
    """MAF: uses every second function in descending order of calls, from the first (0) or the second (1)

    Parameters that were chosen on one half can be evaluated on the other.
    """
    shifted: bool = False
    """MAF: True lets each function start at a random minute of the trace, so that bursts do not coincide"""


def rank_of(options: TraceOptions, functions: int) -> np.ndarray:
    """Returns the rank of each function (i64[functions]): all ranks equally often, in a random order."""
    order = np.random.default_rng((options.seed, 1)).permutation(functions)
    return np.asarray(options.ranks, np.int64)[order % len(options.ranks)]


def chat_prompts(n: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n drawn prompt lengths in tokens (i64[n]), of at most 2,048.

    They are log-normal, with 90 % at most 256 and 99 % at most 1,024.
    """
    low, high = 1.2815515655, 2.3263478740  # the normal quantiles of 0.9 and 0.99
    sigma = log(1024 / 256) / (high - low)
    drawn = np.rint(rng.lognormal(log(256) - low * sigma, sigma, n))
    return np.clip(drawn, 1, 2048).astype(np.int64)


def outputs(n: int, mean: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n drawn answer lengths in tokens (i64[n]): geometric, limited to four times the mean."""
    return np.minimum(rng.geometric(1 / mean, n), 4 * mean).astype(np.int64)


def zipf(n: int, functions: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n drawn indices of functions (i64[n]). The k-th function, from 1, has a share proportional to 1/k."""
    weight = 1 / np.arange(1, functions + 1)
    return rng.choice(functions, n, p=weight / weight.sum())


class Singles:
    """Requests of a trace that lists single requests without functions; each takes 24 bytes."""

    def __init__(self) -> None:
        self._times, self._prompts, self._outputs = array("d"), array("q"), array("q")

    def add(self, line: Line, seconds: float, prompt: int, output: int) -> None:
        """Adds a request at the time `seconds`. 0 prompt or output tokens are raised to 1.

        Raises TraceError beyond MAX_REQUESTS.
        """
        if len(self._times) == MAX_REQUESTS:
            raise line.error(0, f"more than {MAX_REQUESTS} requests")
        self._times.append(seconds)
        self._prompts.append(max(1, prompt))
        self._outputs.append(max(1, output))

    def requests(self, options: TraceOptions) -> list[TraceRequest]:
        """Returns the requests with drawn functions."""
        times = np.array(self._times)
        order, times = arrivals(times - times.min(initial=np.inf), options, options.rate)
        count = options.functions or DEFAULT_FUNCTIONS
        called = zipf(len(times), count, np.random.default_rng((options.seed, 2)))
        prompts, outputs = np.array(self._prompts)[order], np.array(self._outputs)[order]
        return requests_from_columns(times, called, np.zeros(count, np.int64), prompts, outputs, options)


def arrivals(times: np.ndarray, options: TraceOptions, rate: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices (i64[n]) and times (f64[n], seconds, ascending) of the requests to use.

    With `rate` times are stretched to this mean number of requests/s. Requests from `options.seconds` on are left out.
    """
    order = np.argsort(times, kind="stable")
    times = times[order]
    if rate is not None and len(times) and times[-1] > 0:
        times = times * (len(times) / times[-1] / rate)
    if options.seconds is not None:
        times = times[times < options.seconds]
    return order[: len(times)], times


def requests_from_columns(
    times: np.ndarray,
    called: np.ndarray,
    owners: np.ndarray,
    prompts: np.ndarray,
    outputs: np.ndarray,
    options: TraceOptions,
) -> list[TraceRequest]:
    """Returns the requests from columns with an entry per request, with drawn ranks.

    `times` f64[n] are ascending seconds. `called` i64[n] are indices of functions, and `owners` i64[functions] are
    indices of tenants. `prompts` and `outputs` i64[n] are in tokens.
    """
    ranks, names = rank_of(options, len(owners)).tolist(), [f"f{i}" for i in range(len(owners))]
    tenants = [f"t{owner}" for owner in owners.tolist()]
    return [
        TraceRequest(at, names[f], ranks[f], prompt, output, tenants[f])
        for at, f, prompt, output in zip(
            times.tolist(), called.tolist(), prompts.tolist(), outputs.tolist(), strict=True
        )
    ]
