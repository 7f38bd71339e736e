"""Sums by key over a window that slides, against lists of all that was counted; and functions' last hours."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from gateway.last_hour import MAX_FUNCTIONS, Counts, LastHour

SLICE = 60
WINDOW = 60
STEPS = st.lists(st.tuples(st.floats(0, 900), st.sampled_from("fgh"), st.integers(1, 9), st.booleans()), max_size=60)


@given(steps=STEPS)
def test_a_window_holds_what_was_counted_in_it(steps: list[tuple[float, str, int, bool]]) -> None:
    now, untold = 0.0, dict[str, int]()
    hours, ended = LastHour(lambda: now), deque[tuple[int, str, int]]()
    hours.share()
    for pause, function, tokens, told in steps:
        now += pause
        counts = Counts(invocations=1, completion_tokens=tokens)
        if told:
            hours.add_told(("a", function), counts)
        else:
            hours.add(("a", function), counts)
            untold[function] = untold.get(function, 0) + tokens
        ended.append((int(now // SLICE), function, tokens))
    for function in "fgh":
        inside = [n for at, whose, n in ended if whose == function and at > int(now // SLICE) - WINDOW]
        sums = hours.sums("a", function)
        assert (sums.invocations, sums.completion_tokens) == (len(inside), sum(inside))
        assert hours.sums("b", function) == Counts()
    assert {key: counts.completion_tokens for key, counts in hours.take_untold().items()} == {
        ("a", function): tokens for function, tokens in untold.items()
    }
    assert hours.take_untold() == {}


def test_who_was_counted_least_recently_is_forgotten() -> None:
    hours = LastHour(lambda: 0.0)
    hours.share()
    for number in range(MAX_FUNCTIONS):
        hours.add(("a", f"f{number}"), Counts(invocations=1))
    hours.add(("a", "f0"), Counts(invocations=1))
    hours.add(("a", "new"), Counts(invocations=1))
    kept = [hours.sums("a", name).invocations for name in ("f0", "f1", "f2", "new")]
    assert (len(hours.known()), kept) == (MAX_FUNCTIONS, [2, 0, 1, 1])
    told = hours.take_untold()
    assert ("a", "new") not in told and told["a", "f0"].invocations == 2, "no more is kept than is counted"
