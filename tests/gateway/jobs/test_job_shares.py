"""Whose work starts next, and how near to a limit that refuses the rest a tenant's work stays."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jobs.shares import Shares

ALL = ("acme", "")
TICK_S = 0.02


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_tenant_with_the_least_work_comes_first() -> None:
    shares = Shares(Clock(), at_once=8, per_tenant=3)
    for tenant, count in (("a", 2), ("b", 1)):
        for _ in range(count):
            shares.begin((tenant, "f"))
    assert [shares.pick(["a", "b"]), shares.pick(["a", "b", "c"]), shares.pick([])] == ["b", "c", None]
    shares.end(("a", "f"))
    assert {shares.pick(["a", "b"]) for _ in range(100)} == {"a", "b"}, "equals in a random order"
    shares.begin(("a", "g"))
    shares.begin(("a", "f"))
    assert not shares.may_begin(("a", "h")), "it has three in all"
    assert shares.may_begin(("b", "f"))


@given(weights=st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10.0), min_size=2), late=st.integers(0, 50))
def test_starts_are_in_proportion_to_weights(weights: dict[str, float], late: int) -> None:
    """Also for a tenant that comes later than the others, and whether work ends at once or never."""
    shares, tenants = Shares(Clock(), at_once=10_000, weighted=True), sorted(weights)
    shares.weights |= weights
    for number in range(late):
        shares.begin((shares.pick(tenants[1:]) or "", ""))
        if number % 2:
            shares.end((tenants[1], ""))
    started: Counter[str] = Counter()
    for _ in range(500):
        tenant = shares.pick(tenants)
        assert tenant is not None
        shares.begin((tenant, ""))
        started[tenant] += 1
    for one in tenants:
        for other in tenants:
            difference = started[one] / weights[one] - started[other] / weights[other]
            assert abs(difference) <= 2 / weights[one] + 2 / weights[other]


def test_tenants_without_work_are_forgotten() -> None:
    shares = Shares(Clock(), at_once=8, weighted=True)
    shares.weights |= {"a": 2.0, "b": 2.0, "c": 2.0}
    for tenant in ("a", "b"):
        shares.begin((tenant, ""))
    shares.end(("a", ""))
    shares.keep({"c"})
    assert (shares.weights.keys(), shares._started.keys()) == ({"b", "c"}, {"b"})


@pytest.mark.parametrize(
    ("at_once", "per_second", "call_s", "ideal", "most_refused"),
    [
        (1, None, 0.5, 40, 20), (2, None, 0.5, 80, 20), (8, None, 0.5, 320, 20), (32, None, 0.5, 1280, 20),
        (None, 2.0, 0.2, 42, 45), (None, 10.0, 0.2, 210, 30), (None, 100.0, 0.2, 2100, 50),
    ],
)  # fmt: skip
def test_work_stays_near_a_limit_that_refuses_the_rest(
    at_once: int | None, per_second: float | None, call_s: float, ideal: int, most_refused: int
) -> None:
    """Twenty seconds of calls, against a limit of calls at once or of calls per second."""
    clock = Clock()
    shares, ends, done, refused = Shares(clock, at_once=256), list[float](), 0, 0
    tokens, end = per_second or 0.0, clock.now + 20.0
    while clock.now < end:
        while ends and ends[0] <= clock.now:
            heappop(ends)
            shares.windows.record_acceptance(ALL)
            shares.end(ALL)
            done += 1
        for _ in range(8):
            if not shares.may_begin(ALL):
                break
            shares.begin(ALL)
            if (per_second is not None and tokens < 1) or (at_once is not None and len(ends) >= at_once):
                shares.record_refusal(ALL, 1.0 if per_second is None else (1 - tokens) / per_second)
                shares.end(ALL)
                refused += 1
                continue
            tokens -= 1
            heappush(ends, clock.now + call_s)
        clock.now += TICK_S
        tokens = min(per_second or 0.0, tokens + TICK_S * (per_second or 0.0))
    assert done >= 0.9 * ideal
    assert refused <= most_refused
