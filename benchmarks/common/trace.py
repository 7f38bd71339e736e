"""Invocations of real functions: who is called, in which order (benchmarks/data/NOTICE.md)."""

from __future__ import annotations

import csv
import gzip

import numpy as np

from benchmarks.common.report import ROOT

FILE = ROOT / "benchmarks" / "data" / "azure_functions_2019_480min.csv.gz"
FIRST_COUNT = 4


def minute_counts(without_top: int = 0) -> np.ndarray:
    """i64[functions, minutes], busiest function first, without the `without_top` busiest."""
    with gzip.open(FILE, "rt", newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    counts = np.array([[int(cell) for cell in row[FIRST_COUNT:]] for row in rows], dtype=np.int64)
    busiest = np.argsort(-counts.sum(axis=1), kind="stable")
    return counts[busiest][without_top:]


def draw_calls(counts: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """i64[n]: functions in order of call. `n` of all calls, drawn without return; within a minute the order is drawn,
    every order equally likely. Fewer than `n` calls are repeated from the start."""
    functions, minutes = np.nonzero(counts)
    times = counts[functions, minutes]
    function = np.repeat(functions, times)
    minute = np.repeat(minutes, times)
    order = np.lexsort((rng.random(len(minute)), minute))
    calls = function[order]
    if len(calls) < n:
        return np.resize(calls, n)
    return calls[np.sort(rng.choice(len(calls), n, replace=False))]
