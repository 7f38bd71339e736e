"""The table against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.forecast.table import FunctionTable
from tests.support.draws import draws

LIMIT, IDLE_S = 6, 30.0


@settings(max_examples=draws(50))
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 12.0, 31.0]), st.lists(st.integers(0, 12), unique=True, max_size=8)),
        max_size=30,
    )
)
def test_rows_keep_what_belongs_to_their_function(seconds: list[tuple[float, list[int]]]) -> None:
    table = FunctionTable(LIMIT, IDLE_S)
    total = table.column((2,), fill=1.0)
    last: dict[str, float] = {}
    expected: dict[str, float] = {}
    gone: set[str] = set()
    table.entered.append(lambda keys, row: gone.difference_update(table.keys[row : row + len(keys)]))
    table.leaving.append(lambda keys, rows: gone.update(table.keys[row] for row in rows))
    now = 0.0
    for elapsed, numbers in seconds:
        now += elapsed
        keys = [str(number) for number in numbers]
        table.expire(now)
        last = {key: at for key, at in last.items() if at >= now - IDLE_S}
        rows, idle = table.record(keys, now)
        keys = keys[:LIMIT]
        assert [table.keys[row] for row in rows] == keys
        assert idle.tolist() == [now - last.get(key, -np.inf) for key in keys]
        total.live[rows] += 1
        kept = {key: expected[key] for key in table.keys if key in last}
        assert all(last[key] >= max(last[other] for other in set(last) - set(kept) - set(keys)) for key in
                   set(kept) - set(keys)) if set(last) - set(kept) - set(keys) else True  # fmt: skip
        last = {key: now if key in keys else last[key] for key in {*kept, *keys}}
        expected = {key: kept.get(key, 1.0) + (key in keys) for key in last}
        assert len(table) == min(LIMIT, len(table)) and set(table.keys) == set(last)
        assert dict(zip(table.keys, total.live.tolist(), strict=True)) == {k: [v, v] for k, v in expected.items()}
        assert dict(zip(table.keys, table.last_call.live.tolist(), strict=True)) == last
        assert table.last_calls(["absent", *table.keys]).tolist() == [-np.inf, *(last[key] for key in table.keys)]
        assert not gone & set(table.keys)


def test_who_was_called_least_recently_gives_way() -> None:
    table = FunctionTable(3, IDLE_S)
    for now, keys in enumerate((["a"], ["b"], ["c"], ["a", "d"])):
        table.record(keys, float(now))
    assert sorted(table.keys) == ["a", "c", "d"]


def test_room_grows_to_the_limit() -> None:
    table = FunctionTable(5000, IDLE_S)
    value = table.column()
    keys = [str(number) for number in range(6000)]
    table.record(keys[:1000], 0.0)
    value.live[:] = np.arange(1000)
    rows, _ = table.record(keys, 1.0)
    assert len(rows) == len(table) == 5000
    assert value.live[:1000].tolist() == list(range(1000)) and not value.live[1000:].any()
    assert table.bytes == 5000 * (8 + 4)
