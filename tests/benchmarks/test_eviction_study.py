"""The bounds of the eviction study are bounds, its halves share nothing, and it writes a whole report."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.adapter_memory import eviction, eviction_traces
from benchmarks.adapter_memory.eviction import Pool, gap_closed, miss_share, reload_seconds
from benchmarks.adapter_memory.eviction_bounds import Belady, min_miss_share
from benchmarks.adapter_memory.eviction_traces import HELD_OUT, TUNED, Trace, traces
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.eviction import POLICIES
from tests.benchmarks.studies import run_study
from tests.support.draws import draws


def small(calls: list[int], pages: list[int]) -> Trace:
    at = np.arange(len(calls), dtype=float)
    return Trace("drawn", HELD_OUT, at, np.array(calls), [size * 100 for size in pages], pages)


def best(calls: list[int], pages: list[int], pool: int) -> float:
    """The least share of called bytes that any choice of residents misses, tried one by one."""

    @cache
    def missed(at: int, here: frozenset[int]) -> int:
        if at == len(calls):
            return 0
        name = calls[at]
        if name in here:
            return missed(at + 1, here)
        kept = [frozenset(k for i, k in enumerate(sorted(here)) if mask >> i & 1) for mask in range(1 << len(here))]
        fits = [keep | {name} for keep in kept if sum(pages[k] for k in keep) + pages[name] <= pool]
        return pages[name] + min(missed(at + 1, keep) for keep in fits)

    return missed(0, frozenset()) / sum(pages[name] for name in calls)


@settings(max_examples=draws(40))
@given(
    calls=st.lists(st.integers(0, 4), min_size=1, max_size=14),
    pages=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    share=st.floats(0.2, 1),
    equal=st.booleans(),
)
def test_bounds(calls: list[int], pages: list[int], share: float, equal: bool) -> None:
    """PFOO-L is never above the best, no policy below it, and Belady is the best where all sizes are equal."""
    trace = small(calls, [2] * 5 if equal else pages)
    demand = Demand()
    pool = Pool(trace, share, POLICIES["lru"](demand), lambda _: 1.0).total
    least = best(calls, trace.pages, pool)
    assert min_miss_share(trace, pool) <= least + 1e-9
    makers: list[Callable[[Demand], eviction.Policy]] = [*POLICIES.values(), lambda _: Belady(trace)]
    found = [miss_share(trace, share, make) for make in makers]
    assert min(found) >= least - 1e-9
    if equal:
        assert found[-1] == pytest.approx(least)


def test_halves_share_no_function_or_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Function i is called in minute i alone, so that a call's time tells the function; the first ten are busiest."""
    monkeypatch.setattr(eviction_traces, "minute_counts", lambda: np.eye(480, dtype=np.int64))
    monkeypatch.setattr(eviction_traces, "AZURE_WHOLE_WINDOWS", {TUNED: range(5), HELD_OUT: range(5)})
    functions: dict[tuple[int, bool], set[int]] = {}
    for half in (TUNED, HELD_OUT):
        for trace in (trace for trace in traces(half, 0) if trace.name.startswith("azure")):
            first = int(trace.name[-1]) * eviction_traces.WINDOW_MINUTES
            functions.setdefault((half, "whole" in trace.name), set()).update((trace.at // 60).astype(int) + first)
    assert functions[TUNED, True] | functions[HELD_OUT, True] == set(range(480))
    assert not functions[TUNED, True] & functions[HELD_OUT, True]
    for half in (TUNED, HELD_OUT):
        assert functions[half, False] == {name for name in functions[half, True] if name >= eviction_traces.TOP}
    with gzip.open(eviction_traces.SERVEGEN_FILE, "rt", newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    clients = [
        {(row[0], row[1]) for row in rows if int(row[2]) // eviction_traces.BINS_PER_DAY in days}
        for days in eviction_traces.SERVEGEN_DAYS.values()
    ]
    assert all(clients) and not clients[TUNED] & clients[HELD_OUT]


def test_two_tiers_cost_what_their_misses_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters 0 and 1 in turn: both fit the host, one the device, so after two reads all loads are from the host."""
    trace = small([0, 1] * 5, [10, 10, 1])
    link, store = 1000 / 4e9, 1000 / 200e6
    monkeypatch.setattr(eviction, "HOST_POOL", 1.0)
    assert reload_seconds(trace, "lru") == pytest.approx(2 * store + 10 * link)


def test_the_gap() -> None:
    rows = [
        {"miss_lru": 0.5, "miss_cost": 0.3, "miss_belady": 0.1},
        {"miss_lru": 0.3, "miss_cost": 0.3, "miss_belady": 0.1},
    ]
    assert gap_closed(rows, "cost", "belady") == pytest.approx(0.2 / 0.6)


def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    run_study(monkeypatch, "adapter_memory.eviction", "--quick", "--json", str(file))
    document = json.loads(file.read_text())
    figures = document["figures"]
    assert document["simulated"]
    assert figures["gap_closed_lru"] == 0 and figures["worst_over_lru_lru"] == 1
    assert figures["miss_share_bound"] <= figures["miss_share_belady"] <= figures["miss_share_lru"]
    assert figures["gap_closed_cost"] > 1 / 3 and figures["worst_over_lru_cost"] <= 1.02
