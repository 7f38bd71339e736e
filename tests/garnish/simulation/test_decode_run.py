"""Steps in closed form against steps added up one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from garnish.simulation.decode_run import DecodeRun


@given(
    st.floats(0, 1e4),
    st.floats(1e-4, 1.0),
    st.floats(0, 1.0),
    st.integers(1, 300),
    st.floats(0, 1.2),
)
def test_it_is_the_sum_of_its_steps(begin: float, first: float, share: float, steps: int, where: float) -> None:
    growth = first * share
    ends = [begin]
    for step in range(steps):
        ends.append(ends[-1] + first + growth * step)
    run = DecodeRun(begin, first, growth, steps)
    assert run.end == pytest.approx(ends[-1], abs=1e-6)
    now = begin + (ends[-1] - begin) * where
    if min(abs(now - end) for end in ends) < 1e-6:
        return  # on a border either side is right
    assert run.done_by(now) == sum(end <= now for end in ends[1:])
    run.cut(now)
    assert run.steps == min(steps, sum(end <= now for end in ends[1:]) + 1)


def test_borders() -> None:
    run = DecodeRun(1.0, 0.5, 0.0, 4)
    assert [run.done_by(at) for at in (0.0, 1.0, 1.49, 1.5, 3.0, 9.0)] == [0, 0, 0, 1, 4, 4]
    run.cut(1.0)
    assert (run.steps, run.end) == (1, 1.5), "a step that has begun is ended"
    run = DecodeRun(1.0, 0.5, 0.0, 4)
    run.cut(2.0)
    assert run.steps == 2, "nothing begins at the very time of the cut"
