"""Which promises a call kept, and sums of them over sliding windows."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.attainment import MAX_TENANTS, SLICE_S, WINDOWS_S, Attainment, judge

ONE = st.dictionaries(st.sampled_from(["ttft", "tpot", "all"]), st.booleans(), min_size=1)


@pytest.mark.parametrize(
    ("promised", "seen", "answered", "outcome"),
    [
        ((None, None), (1.0, 1.0), True, {}),
        ((2.0, None), (1.0, 9.0), True, {"ttft": True, "all": True}),
        ((2.0, 0.1), (3.0, 0.1), True, {"ttft": False, "tpot": True, "all": False}),
        ((2.0, 0.1), (1.0, None), True, {"ttft": True, "tpot": True, "all": True}),
        ((2.0, 0.1), (1.0, 0.05), False, {"ttft": False, "tpot": False, "all": False}),
        ((None, 0.1), (None, None), False, {"tpot": False, "all": False}),
    ],
)
def test_what_was_kept(promised: tuple, seen: tuple, answered: bool, outcome: dict) -> None:
    assert judge(promised, seen, answered) == outcome


@given(steps=st.lists(st.tuples(st.floats(0, 900), ONE), max_size=60))
def test_windows_hold_what_ended_in_them(steps: list[tuple[float, dict]]) -> None:
    """Against a list of all calls."""
    now = 0.0
    attainment, ended = Attainment(lambda: now), deque[tuple[int, dict]]()
    for pause, outcome in steps:
        now += pause
        attainment.record("a", outcome)
        ended.append((int(now // SLICE_S), outcome))
    for seconds, kept in zip(WINDOWS_S, attainment.of("a"), strict=True):
        inside = [outcome for at, outcome in ended if at > int(now // SLICE_S) - seconds // SLICE_S]
        assert kept.calls == len(inside)
        for promise in ("ttft", "tpot", "all"):
            judged = [outcome[promise] for outcome in inside if promise in outcome]
            assert kept.share(promise) == (sum(judged) / len(judged) if judged else None)
    assert len(attainment._slices.get("a", {})) <= WINDOWS_S[-1] // SLICE_S


def test_tenants_are_bounded() -> None:
    attainment = Attainment(lambda: 0.0)
    for number in range(MAX_TENANTS + 5):
        attainment.record(f"t{number}", {"ttft": True})
    attainment.record("nothing promised", {})
    assert len(attainment.all()) == MAX_TENANTS
    assert attainment.of("t0")[0].calls == 0
