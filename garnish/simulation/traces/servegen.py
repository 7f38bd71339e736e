"""ServeGen: client_id,timestamp_s,rate_rps,cv,pattern,param1,param2; a row per client and window of 600 s.

A client is a function and a tenant. A window has rate * 600 requests, rounded; gaps between them are drawn from its law
(Gamma or Weibull with shape param1, else exponential) and scaled so that they fill the window. Lengths are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.build import MAX_REQUESTS, rows
from garnish.simulation.traces.errors import TraceError
from garnish.simulation.traces.laws import Laws, chat_prompts, outputs
from garnish.simulation.traces.lines import Line, cells

NAMES = ["client_id", "timestamp_s", "rate_rps", "cv", "pattern", "param1", "param2"]
WINDOW = 600.0
PATTERNS = ("", "Gamma", "Weibull", "Exponential")


def is_servegen(header: str) -> bool:
    return header.split(",") == NAMES


def read_servegen(lines: Iterator[Line], laws: Laws) -> list[TraceRequest]:
    """Reads a trace of ServeGen. Raises TraceError."""
    line = next(lines)
    rng, known = np.random.default_rng((laws.seed, 0)), dict[str, int]()
    times, called = list[np.ndarray](), list[np.ndarray]()
    total = 0
    for line in lines:
        client, begin, rate, _, pattern, shape, _ = cells(line, NAMES)
        at, per_second = begin.number(float, 0, 1e10), rate.number(float, 0, 1e6)
        if pattern.text not in PATTERNS:
            raise pattern.error(f"expected Gamma, Weibull, Exponential or nothing, found {pattern.text[:40]!r}")
        number = known.setdefault(client.text, len(known))
        count = round(per_second * WINDOW)
        total += count
        if total > MAX_REQUESTS:
            raise TraceError(line.file, line.number, 0, "too many requests up to here: take fewer seconds")
        if not count or (laws.seconds is not None and laws.rate is None and at >= laws.seconds):
            continue
        least = 0.02 if pattern.text in ("Gamma", "Weibull") else 0.0
        times.append(at + _within(count, pattern.text, shape.number(float, least, 1e6), rng))
        called.append(np.full(count, number, np.int64))
    if not times:
        raise TraceError(line.file, line.number, 0, "no client sends anything")
    return _rows(np.concatenate(times), np.concatenate(called), len(known), laws, rng)


def _rows(at: np.ndarray, who: np.ndarray, clients: int, laws: Laws, rng: np.random.Generator) -> list[TraceRequest]:
    order = np.argsort(at, kind="stable")
    at, who = at[order], who[order]
    if laws.rate is not None and at[-1] > 0:
        at = at * (len(at) / at[-1] / laws.rate)
    if laws.seconds is not None:
        at = at[at < laws.seconds]
    n = len(at)
    return rows(at, who, np.arange(clients), chat_prompts(n, rng), outputs(n, laws.mean_output, rng), laws)


def _within(count: int, pattern: str, shape: float, rng: np.random.Generator) -> np.ndarray:
    """Returns the times of a window's `count` requests: f64[count], seconds from the window's beginning, ascending."""
    if pattern == "Gamma":
        gaps = rng.gamma(shape, size=count + 1)
    elif pattern == "Weibull":
        gaps = rng.weibull(shape, size=count + 1)
    else:
        gaps = rng.exponential(size=count + 1)
    passed = np.cumsum(gaps)
    inside: np.ndarray = passed[:-1] / max(passed[-1], 1e-300) * WINDOW
    return inside
