"""Calls of real functions and clients for the eviction study: one half of them to tune on, the other to report."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass

import numpy as np

from benchmarks.adapter_memory.allocators import Shape
from benchmarks.adapter_memory.memory import BASES, RANKS
from benchmarks.common.report import ROOT
from benchmarks.common.trace import minute_counts
from node_agent.adapter_memory.pages import choose_page_size

TUNED, HELD_OUT = 0, 1
"""The halves. No function or client is in both."""
SPLIT_SEED = 1234
WINDOW_MINUTES = 96
TOP = 10
AZURE_WINDOWS = {TUNED: range(5), HELD_OUT: range(5)}
AZURE_WHOLE_WINDOWS: dict[int, tuple[int, ...]] = {TUNED: (), HELD_OUT: (1, 3)}
"""Slices with the busiest functions in them."""
SERVEGEN_DAYS = {TUNED: (2, 3, 5, 8, 9), HELD_OUT: (4, 6, 7, 10, 12)}
"""Eight hours of each, from 8:00 of the trace's clock."""
SERVEGEN_FILE = ROOT / "benchmarks" / "data" / "servegen_requests.csv.gz"
SERVEGEN_KEPT = 0.002
"""Share of its requests that are kept, drawn one by one: the service had far more nodes than one."""
BIN_S = 600
BINS_PER_DAY = 86_400 // BIN_S
QKV = (0, 1, 2)


@dataclass(frozen=True)
class Trace:
    name: str
    half: int
    at: np.ndarray
    """f64[calls], seconds, ascending"""
    adapter: np.ndarray
    """i64[calls]"""
    sizes: list[int]
    pages: list[int]


def traces(half: int, seed: int) -> list[Trace]:
    """All of one half."""
    drawn = [_azure(f"azure-{window}", half, window, seed) for window in AZURE_WINDOWS[half]]
    drawn += [
        _azure(f"azure-whole-{window}", half, window, seed, with_busiest=True) for window in AZURE_WHOLE_WINDOWS[half]
    ]
    return drawn + [_servegen(day, half, seed) for day in SERVEGEN_DAYS[half]]


def _azure(name: str, half: int, window: int, seed: int, *, with_busiest: bool = False) -> Trace:
    """Calls are uniform within their minute. `with_busiest`: with the half's share of the busiest functions."""
    counts = minute_counts()
    mine = TOP + np.random.default_rng(SPLIT_SEED).permutation(len(counts) - TOP)[half::2]
    counts = counts[
        np.concatenate([np.arange(half, TOP, 2), mine]) if with_busiest else mine,
        window * WINDOW_MINUTES : (window + 1) * WINDOW_MINUTES,
    ]
    counts = counts[counts.sum(axis=1) > 0]
    function, minute = np.nonzero(counts)
    return _trace(name, half, function, minute * 60, counts[function, minute], 60, seed + window)


def _servegen(day: int, half: int, seed: int) -> Trace:
    """Calls are uniform within their ten minutes. The file has of each day only the clients of its half."""
    rng = np.random.default_rng(seed + day)
    with gzip.open(SERVEGEN_FILE, "rt", newline="") as stream:
        rows = [row for row in list(csv.reader(stream))[1:] if int(row[2]) // BINS_PER_DAY == day]
    clients = {client: i for i, client in enumerate(dict.fromkeys((row[0], row[1]) for row in rows))}
    adapter = np.array([clients[row[0], row[1]] for row in rows])
    at, requests = np.array([(int(row[2]) % BINS_PER_DAY, int(row[3])) for row in rows]).T
    calls = rng.binomial(requests, SERVEGEN_KEPT)
    return _trace(f"servegen-day-{day}", half, adapter, at * BIN_S, calls, BIN_S, seed + day)


def _trace(
    name: str, half: int, adapter: np.ndarray, begin: np.ndarray, calls: np.ndarray, width_s: int, seed: int
) -> Trace:
    """`calls` of each `adapter` within `width_s` seconds from `begin`."""
    rng = np.random.default_rng(seed)
    at = np.repeat(begin, calls) + rng.random(calls.sum()) * width_s
    order = np.argsort(at, kind="stable")
    base = BASES["llama-7b"]
    sizes = [Shape(base, RANKS[i % len(RANKS)], QKV).live for i in range(int(adapter.max()) + 1)]
    page = choose_page_size(base, 2)
    return Trace(name, half, at[order], np.repeat(adapter, calls)[order], sizes, [-(-size // page) for size in sizes])
