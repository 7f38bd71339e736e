"""Sizes of a pool: what a load asks for, and how decisions are steadied. Time is passed in, so none passes here."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.autoscale.sizing import Load, Sizer, Targets, desired_size

TARGETS = Targets(min=1, max=8, utilisation=0.5, queue_wait=1.0, up_seconds=10.0, down_seconds=60.0)
TO_ZERO = msgspec.structs.replace(TARGETS, min=0, scale_to_zero_after=120.0)
IDLE = Load(open_requests=0, queue_wait=0.0, demand=0.0, backlog=0.0, attainment=None)


def load(demand: float, **fields: object) -> Load:
    given_fields = {"open_requests": 1, "queue_wait": 0.0, "backlog": 0.0, "attainment": None, **fields}
    return Load(demand=demand, **given_fields)  # type: ignore[arg-type]


loads = st.builds(
    Load,
    open_requests=st.integers(0, 1000),
    queue_wait=st.floats(0, 600),
    demand=st.floats(0, 100),
    backlog=st.floats(0, 1e5),
    attainment=st.none() | st.floats(0, 1),
)


@st.composite
def targets(draw: st.DrawFn) -> Targets:
    least = draw(st.integers(0, 8))
    return Targets(
        min=least,
        max=draw(st.integers(max(1, least), 16)),
        up_seconds=draw(st.floats(0, 60)),
        down_seconds=draw(st.floats(0, 600)),
        scale_to_zero_after=draw(st.none() | st.floats(0, 600)),
    )


@pytest.mark.parametrize(
    ("now", "current", "size"),
    [
        (load(0.5), 1, 1),
        (load(0.6), 1, 2),
        (load(2.0), 4, 4),
        (load(2.0), 1, 2),  # at most twice as many in a step
        (load(2.0), 2, 4),
        (load(9.0), 8, 8),  # the bound
        (load(0.1, queue_wait=1.0), 3, 1),
        (load(0.1, queue_wait=1.1), 3, 4),
        (load(0.5, queue_wait=5.0, backlog=4.5), 3, 5),
        (load(0.1, attainment=0.5), 3, 4),
        (load(0.1, attainment=0.99), 3, 1),
        (IDLE, 3, 1),
    ],
)
def test_what_a_load_asks_for(now: Load, current: int, size: int) -> None:
    assert desired_size(now, current, TARGETS).size == size


def test_the_reason_is_told() -> None:
    assert desired_size(load(0.1, queue_wait=3.0), 1, TARGETS).reason == "a queue wait of 3.0 s"
    assert desired_size(load(9.0), 8, TARGETS).reason == "demand of 9.00 nodes, and max is 8"


def test_an_empty_pool_gets_its_first_node_at_once() -> None:
    assert Sizer(TO_ZERO).decide(0.0, load(0.0, queue_wait=0.1), 0).size == 1


def test_growth_waits_for_its_window() -> None:
    sizer = Sizer(TARGETS)
    sizes = [sizer.decide(float(now), load(2.0), 2).size for now in range(0, 13, 2)]
    assert sizes == [2, 2, 2, 2, 2, 4, 4]


def test_a_short_burst_is_let_pass() -> None:
    sizer = Sizer(TARGETS)
    for now in range(0, 60, 5):
        demand = 3.0 if now == 30 else 0.9
        assert sizer.decide(float(now), load(demand), 2).size == 2


def test_shrinking_waits_for_its_longer_window() -> None:
    sizer = Sizer(TARGETS)
    assert sizer.decide(0.0, load(2.0), 4).size == 4
    sizes = [(now, sizer.decide(float(now), load(0.5), 4).size) for now in range(10, 90, 10)]
    assert [now for now, size in sizes if size < 4] == [70, 80]


def test_the_last_node_stays_until_it_was_idle_for_long() -> None:
    sizer, size, seen = Sizer(TO_ZERO), 2, []
    sizer.decide(0.0, load(0.9), size)
    for now in range(10, 150, 10):
        size = sizer.decide(float(now), IDLE, size).size
        seen.append((now, size))
    assert [now for now, size in seen if size == 1] == [70, 80, 90, 100, 110]
    assert [now for now, size in seen if size == 0] == [120, 130, 140]


def test_a_wait_for_a_node_that_started_counts_from_when_it_was_ready() -> None:
    """A call that waited half a minute for the first node may take some seconds more until it is placed there."""
    sizer = Sizer(TO_ZERO)
    assert sizer.decide(0.0, load(0.0, queue_wait=1.0), 0).size == 1
    for now in range(2, 32, 2):
        assert sizer.decide(float(now), load(0.0, queue_wait=1.0 + now), 1, starting=True).size == 1
    sizes = [(now, sizer.decide(float(now), load(0.0, queue_wait=1.0 + now), 1).size) for now in range(31, 50)]
    assert [now for now, size in sizes if size > 1] == list(range(42, 50)), "ready at 30, too long from 31 on"


def test_without_leave_to_be_empty_one_node_stays() -> None:
    sizer = Sizer(msgspec.structs.replace(TARGETS, min=0))
    assert [sizer.decide(float(now), IDLE, 1).size for now in range(0, 10_000, 100)] == [1] * 100


@given(loads, st.integers(0, 16), targets())
def test_sizes_are_within_the_bounds(now: Load, current: int, goal: Targets) -> None:
    size = desired_size(now, current, goal).size
    assert goal.min <= size <= goal.max
    assert size <= max(goal.min, 1, current + 1, int(current * goal.growth))
    if now.open_requests:
        assert size >= 1


@given(loads, st.integers(1, 16), targets(), st.floats(0, 50))
def test_more_demand_never_asks_for_fewer(now: Load, current: int, goal: Targets, more: float) -> None:
    heavier = msgspec.structs.replace(now, demand=now.demand + more)
    assert desired_size(heavier, current, goal).size >= desired_size(now, current, goal).size


@given(st.lists(st.tuples(st.floats(0.1, 100), loads), max_size=30), targets(), st.data())
def test_steadied_sizes_keep_to_the_bounds_and_to_one_direction(
    steps: list[tuple[float, Load]], goal: Targets, data: st.DataObject
) -> None:
    sizer, now = Sizer(goal), 0.0
    current = data.draw(st.integers(goal.min, goal.max))
    for pause, each in steps:
        now += pause
        asked = desired_size(each, current, goal).size
        size = sizer.decide(now, each, current).size
        assert goal.min <= size <= goal.max
        assert min(asked, current) <= size <= max(asked, current)
        current = size
