"""Sums by key over a window that slides, against lists of all that was counted; and functions' last hours."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.last_hour import MAX_FUNCTIONS, Counts, LastHour, name_of

SLICE = 60
WINDOW = 60
STEPS = st.lists(st.tuples(st.floats(0, 900), st.sampled_from("fgh"), st.integers(1, 9), st.booleans()), max_size=60)


@given(steps=STEPS)
def test_a_window_holds_what_was_counted_in_it(steps: list[tuple[float, str, int, bool]]) -> None:
    """And what is taken to be told is told once, unless the window has left it behind."""
    now = 0.0
    hours, ended, told = LastHour(lambda: now), deque[tuple[int, str, int]](), dict[tuple[str, int], int]()
    hours.report_all()

    def tell(most: int) -> None:
        for name, at, counts in hours.take_unreported(most):
            told[name, at] = told.get((name, at), 0) + counts.completion_tokens

    for pause, function, tokens, tells in steps:
        now += pause
        hours.record("a", function, Counts(invocations=1, completion_tokens=tokens))
        ended.append((int(now // SLICE), function, tokens))
        if tells:
            tell(tokens)
    tell(10_000)
    assert hours.take_unreported(1) == []
    for function in "fgh":
        inside = [n for at, whose, n in ended if whose == function and at > int(now // SLICE) - WINDOW]
        sums = hours.of(name_of("a", function))[0]
        assert (sums.invocations, sums.completion_tokens) == (len(inside), sum(inside))
        assert hours.of(name_of("b", function))[0] == Counts()
        recent = (n for (name, at), n in told.items() if name == f"a/{function}" and at > int(now // SLICE) - WINDOW)
        assert sum(recent) == sum(inside)
    hours.report_all()
    within = [n for at, _, n in ended if at > int(now // SLICE) - WINDOW]
    again = [(at, sums.completion_tokens) for _, at, sums in hours.take_unreported(10_000)]
    assert sum(n for at, n in again if at > int(now // SLICE) - WINDOW) == sum(within)


def test_who_was_counted_least_recently_is_forgotten() -> None:
    hours = LastHour(lambda: 0.0)
    hours.report_all()
    for number in range(MAX_FUNCTIONS):
        hours.record("a", f"f{number}", Counts(invocations=1))
    hours.record("a", "f0", Counts(invocations=1))
    hours.record("a", "new", Counts(invocations=1))
    kept = [hours.of(name_of("a", name))[0].invocations for name in ("f0", "f1", "f2", "new")]
    assert (len(hours.all()), kept) == (MAX_FUNCTIONS, [2, 0, 1, 1])
    told = {name: sums for name, _, sums in hours.take_unreported(10_000)}
    assert "a/new" not in told and told["a/f0"].invocations == 2, "no more is kept than is counted"
