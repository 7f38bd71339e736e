"""Drawn seconds of calls, and what drives a predictor through them as the forecaster does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from hypothesis import strategies as st

from cluster.forecast.predictor import Predictor, Second
from cluster.forecast.table import FunctionTable

MONDAY = 1_573_430_400.0
"""00:00 UTC of one, in unix seconds."""
KEYS = ("a", "b", "c", "d")
Calls = tuple[float, dict[str, int]]
"""Seconds since the observation before, and the calls."""

drawn_calls = st.lists(
    st.tuples(
        st.one_of(st.just(1.0), st.sampled_from([0.0, 1.5, 7.0, 40.0, 300.0, 1790.0])),
        st.dictionaries(st.sampled_from(KEYS), st.integers(1, 3), max_size=3),
    ),
    min_size=1,
    max_size=40,
)


def drive(
    make: Callable[[FunctionTable], Predictor], calls: list[Calls], idle_s: float = 2101.0, unix: float = MONDAY
) -> Iterator[tuple[float, dict[str, np.ndarray]]]:
    """Yields after each second the clock and the chances of every function of the table."""
    table = FunctionTable(1000, idle_s)
    predictor = make(table)
    now = 0.0
    for elapsed, counts in calls:
        now += elapsed
        table.expire(now)
        rows, idle = table.record(list(counts), now)
        calls_of = np.array(list(counts.values()), np.float32)
        predictor.observe(Second(now, elapsed, unix + now, rows, calls_of, idle))
        yield now, dict(zip(table.keys, predictor.chances(now), strict=True))
