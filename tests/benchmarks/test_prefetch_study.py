"""The prefetch study: its node keeps its books, forecasts know only the past, and an oracle helps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.adapter_memory.eviction_traces import HELD_OUT, Trace
from benchmarks.adapter_memory.prefetch import Likely, Node, figures_of, forecasts_of, oracle_of, replay, row_of
from benchmarks.adapter_memory.tables import prefetch_table
from benchmarks.common.report import report


def drawn(seed: int, seconds: float = 2000.0, calls: int = 300, functions: int = 40) -> Trace:
    rng = np.random.default_rng(seed)
    pages = rng.integers(1, 5, functions).tolist()
    at = np.sort(rng.uniform(0, seconds, calls))
    return Trace("drawn", HELD_OUT, at, rng.integers(0, functions, calls), [page << 20 for page in pages], pages)


@pytest.mark.parametrize("seed", range(4))
def test_a_node_keeps_its_books(seed: int) -> None:
    """Drawn wants, right and wrong: no pool is overfull, every call is counted once, and bytes are judged once."""
    trace, draw = drawn(seed), random.Random(seed)
    brought = 0

    def likely(_: int) -> Likely:
        chosen = draw.sample(range(40), 8)
        return sorted(((str(i), draw.uniform(0.1, 1.0)) for i in chosen), key=lambda each: -each[1])

    node = replay(trace, likely, 0.25)
    for pool in (node.device, node.host):
        assert pool.free >= 0
        assert pool.free + sum(pool.pages[digest] for digest in pool.residents) == pool.total
    assert node.calls_by_tier.total() == len(trace.at)
    brought = sum(trace.sizes[int(digest)] for digest in node.prefetched)
    judged = node.record.useful_bytes + node.record.wasted_bytes
    assert judged > 0
    assert brought + judged <= sum(trace.sizes) * 2000 / 2


def test_without_wants_it_is_the_eviction_study() -> None:
    trace = drawn(1)
    off, none = replay(trace, None, 0.25), replay(trace, lambda _: (), 0.25)
    assert (off.calls_by_tier, off.waits_s) == (none.calls_by_tier, none.waits_s)


def test_an_oracle_spares_waits() -> None:
    trace = drawn(2)
    off, oracle = replay(trace, None, 0.25), replay(trace, oracle_of(trace), 0.25)
    assert oracle.waits_s < off.waits_s / 2


def test_forecasts_know_nothing_of_what_comes() -> None:
    """A trace and one that goes on otherwise have the same forecasts until then."""
    trace = drawn(3, 200.0)
    half = len(trace.at) // 2
    other = Trace(trace.name, trace.half, trace.at, np.append(trace.adapter[:half], np.zeros(half, int)), trace.sizes,
                  trace.pages)  # fmt: skip
    until = int(trace.at[half])
    mine, its = forecasts_of(trace), forecasts_of(other)
    early = [second for second in mine if second <= until]
    assert len(early) > 20
    assert any(mine[second] for second in early)
    assert all(mine[second] == its[second] for second in early)


def test_an_adapter_leaves_for_a_likelier_one_alone() -> None:
    trace = Trace("two", HELD_OUT, np.array([0.0]), np.array([0]), [1 << 20] * 9, [1] * 9)
    node = Node(trace, 0.25)
    node.host.total = node.host.free = 1
    for _ in range(20):
        node.call(0, 0.0)
    node.plan([("1", 0.9)], 2.0)
    assert list(node.host.residents) == ["0"], "its calls make it as good as certain"
    node.plan([("1", 0.9)], 2000.0)
    assert list(node.host.residents) == ["1"]
    node.plan([("2", 0.9), ("1", 0.5)], 2002.0)
    assert list(node.host.residents) == ["1"], "0.5 is more than half of 0.9"


def test_a_report_has_a_table() -> None:
    rows = [row_of(drawn(seed, 100.0), 0.25) for seed in (4, 5)]
    text = prefetch_table(report("prefetch", {}, 0, rows, figures_of(rows), simulated=True))
    assert "600 calls in 2 traces" in text
    assert text.count("\n| ") == 4
