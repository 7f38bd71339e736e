"""Azure Functions 2019: a row per function, a column per minute with its invocations.

Header: HashOwner,HashApp,HashFunction,Trigger, then the minutes' numbers. Inside a minute invocations are spread evenly
at random, each drawn by itself (Poisson arrivals given their number). Prompts and outputs are drawn (`laws`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.build import MAX_REQUESTS, rows
from garnish.simulation.traces.errors import TraceError
from garnish.simulation.traces.laws import Laws, chat_prompts, outputs
from garnish.simulation.traces.lines import Line, cells

FIRST = ("HashOwner", "HashApp", "HashFunction", "Trigger")
MAX_COUNT = 10_000_000


def is_maf(header: str) -> bool:
    return header.startswith(",".join(FIRST[:3]))


def read_maf(lines: Iterator[Line], laws: Laws) -> list[TraceRequest]:
    """Reads calls a minute by function, of Azure Functions. Raises TraceError."""
    counts, owners, last = _counts(lines)
    busiest = np.argsort(-counts.sum(axis=1), kind="stable")[laws.skip_top :]
    busiest = busiest if laws.half is None else busiest[laws.half :: 2]
    if not len(busiest):
        raise TraceError(last.file, last.number, 0, f"no function is left without the {laws.skip_top} busiest")
    counts, owners = counts[busiest], owners[busiest]
    rng = np.random.default_rng((laws.seed, 0))
    if laws.functions is not None:
        drawn = rng.integers(0, len(counts), laws.functions)
        counts, owners = counts[drawn], np.arange(laws.functions) % max(1, len(np.unique(owners)))
    minutes = counts.shape[1]
    kept = minutes if laws.seconds is None else min(minutes, max(1, int(-(-laws.seconds // 60))))
    if laws.shifted:
        begins = rng.integers(0, minutes, len(counts))
        counts = np.take_along_axis(counts, (begins[:, None] + np.arange(kept)) % minutes, axis=1)
    counts = counts[:, :kept]
    total = counts.sum()
    if laws.rate is not None and total:
        counts = rng.poisson(counts * (laws.rate * 60 * counts.shape[1] / total))
        total = counts.sum()
    if total > MAX_REQUESTS:
        raise TraceError(last.file, last.number, 0, f"{total} requests are too many: take fewer seconds, or a rate")
    return _spread(counts, owners, laws, rng)


def _spread(counts: np.ndarray, owners: np.ndarray, laws: Laws, rng: np.random.Generator) -> list[TraceRequest]:
    functions, minutes = np.nonzero(counts)
    times = counts[functions, minutes]
    at = (np.repeat(minutes, times) + rng.random(int(times.sum()))) * 60
    order = np.argsort(at, kind="stable")
    at, called = at[order], np.repeat(functions, times)[order]
    if laws.seconds is not None:
        at = at[at < laws.seconds]
    n = len(at)
    return rows(at, called, owners, chat_prompts(n, rng), outputs(n, laws.mean_output, rng), laws)


def _counts(lines: Iterator[Line]) -> tuple[np.ndarray, np.ndarray, Line]:
    """Returns the calls of each function and minute (i64[functions, minutes]), the functions' owners (i64[functions]),
    and the last line. Raises TraceError."""
    line = next(lines)
    names = line.text.split(",")
    if len(names) == len(FIRST):
        raise line.error(len(line.text), "no minute is named after the trigger")
    rows_, owners, known = list[list[int]](), list[int](), dict[str, int]()
    for line in lines:
        found = cells(line, names)
        owners.append(known.setdefault(found[0].text, len(known)))
        rows_.append([0 if cell.text == "0" else cell.number(int, 0, MAX_COUNT) for cell in found[len(FIRST) :]])
    if not rows_:
        raise line.error(0, "the trace has a header and no function")
    return np.array(rows_, np.int64), np.array(owners, np.int64), line
