"""Columns that a reader has found, as the requests of a trace."""

from __future__ import annotations

from array import array

import numpy as np

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.laws import Laws, rank_of, zipf
from garnish.simulation.traces.lines import Line

MAX_REQUESTS = 20_000_000
DEFAULT_FUNCTIONS = 100


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
        return single_requests(np.array(self._times), np.array(self._prompts), np.array(self._outputs), laws)


def single_requests(times: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, laws: Laws) -> list[TraceRequest]:
    """Returns the requests of a trace that has each request's time (s) and lengths, but names no function."""
    if not len(times):
        return []
    order = np.argsort(times, kind="stable")
    times, prompts, outputs = times[order] - times[order[0]], prompts[order], outputs[order]
    if laws.rate is not None and times[-1] > 0:
        times = times * (len(times) / times[-1] / laws.rate)
    if laws.seconds is not None:
        times = times[times < laws.seconds]
    count = laws.functions or DEFAULT_FUNCTIONS
    called = zipf(len(times), count, np.random.default_rng((laws.seed, 2)))
    return rows(times, called, np.zeros(count, np.int64), prompts, outputs, laws)


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
            times.tolist(), called.tolist(), prompts.tolist(), outputs.tolist(), strict=False
        )
    ]
