"""Counts of the pools' loads, by a clock of our own: against a recount from everything that happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.pool_loads import WINDOW, PoolLoad, PoolLoads, QueueSample, add_up

POOLS = ("a", "b", None)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def of(loads: PoolLoads) -> dict[str | None, PoolLoad]:
    return add_up(loads.here())


def test_a_request_counts_until_its_end() -> None:
    clock = Clock()
    loads = PoolLoads(clock)
    stay = loads.track(99.0)
    assert of(loads) == {}
    stay.wait(None, None)
    clock.now = 101.0
    assert (of(loads)[None].open, of(loads)[None].queue_wait) == (1, 2.0)
    stay.wait("a", 0.5)
    found = of(loads)["a"]
    assert (found.open, found.queue_wait, found.backlog, found.demand) == (1, 0.0, 0.5, 0.05), "it was held before"
    clock.now = 102.5
    assert of(loads)["a"].queue_wait == 1.5
    assert of(loads).get(None, PoolLoad(None)).open == 0
    stay.begin()
    assert (of(loads)["a"].open, of(loads)["a"].queue_wait, of(loads)["a"].backlog) == (1, 0.0, 0.0)
    stay.wait("b", 0.7)  # again elsewhere: it has come once
    assert of(loads)["b"].arrived == 0
    stay.end()
    stay.end()
    stay.judge(True)
    assert (of(loads)["b"].open, of(loads)["b"].attainment) == (0, 1.0)
    clock.now += WINDOW
    of(loads)
    assert of(loads) == {}, "nothing is kept of pools without calls"


def test_loads_of_workers_add_up() -> None:
    clock = Clock()
    loads, other = PoolLoads(clock), PoolLoads(clock)
    loads.track(100.0).wait("a", 1.0)
    other.track(98.0).wait("a", 2.0)
    found = add_up([*loads.here(), *other.here()])["a"]
    assert (found.open, found.queue_wait, found.arrived, found.backlog) == (2, 2.0, 3.0, 3.0)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["wait", "begin", "end", "judge", "pass"]),
            st.integers(0, 3),
            st.sampled_from(POOLS),
            st.floats(0.01, 5.0),
        ),
        max_size=60,
    )
)
def test_counts_are_those_of_what_happened(steps: list[tuple[str, int, str | None, float]]) -> None:
    clock = Clock()
    loads = PoolLoads(clock)
    stays: list[QueueSample] = [loads.track(clock.now) for _ in range(4)]
    where: dict[int, tuple[str | None, float, bool]] = {}
    arrived: list[tuple[int, str, float]] = []
    judged: list[tuple[int, str | None]] = []
    last: dict[int, str | None] = {}
    came: set[int] = set()
    for action, number, pool, value in steps:
        stay = stays[number]
        if action == "pass":
            clock.now += value
        elif action == "wait":
            stay.wait(pool, value)
            where[number], last[number] = (pool, value, True), pool
            if pool is not None and number not in came:
                came.add(number)
                arrived.append((int(clock.now), pool, value))
        elif action == "begin":
            stay.begin()
            if number in where:
                where[number] = (*where[number][:2], False)
        elif action == "end":
            stay.end()
            where.pop(number, None)
        else:
            stay.judge(True)
            judged.append((int(clock.now), last.get(number)))
    found, since = of(loads), int(clock.now) - WINDOW
    for pool in POOLS:
        load = found.get(pool, PoolLoad(pool))
        here = [entry for entry in where.values() if entry[0] == pool]
        assert load.open == len(here)
        assert load.backlog == pytest.approx(sum(work for _, work, waits in here if waits))
        assert load.arrived == pytest.approx(sum(work for at, name, work in arrived if name == pool and at > since))
        assert load.promised == sum(name == pool and at > since for at, name in judged)
