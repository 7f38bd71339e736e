"""A shared link against a simulation of it in small steps of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.performance_model import Transfer
from garnish.simulation.link import SharedLink

SPEED = Transfer(latency=0.01, bandwidth=1000.0)


def exact(starts: list[tuple[float, int]]) -> list[float]:
    """Ends of transfers that share equally: from event to event, every left-over is reckoned anew."""
    left: dict[int, float] = {}
    ends, now, coming = [0.0] * len(starts), 0.0, sorted(range(len(starts)), key=lambda i: starts[i][0])
    while left or coming:
        until = starts[coming[0]][0] if coming else float("inf")
        done = now + min(left.values()) * len(left) / SPEED.bandwidth if left else float("inf")
        then = min(until, done)
        for i in left:
            left[i] -= (then - now) * SPEED.bandwidth / len(left)
        now = then
        if until <= done:
            i = coming.pop(0)
            left[i] = starts[i][1] + SPEED.latency * SPEED.bandwidth
        else:
            for i in [i for i, rest in left.items() if rest <= 1e-6]:
                ends[i] = now
                del left[i]
    return ends


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 2000)), min_size=1, max_size=12))
def test_transfers_share_equally(starts: list[tuple[float, int]]) -> None:
    starts.sort()
    link, sizes, ends = SharedLink(SPEED), {str(i): size for i, (_, size) in enumerate(starts)}, {}
    coming = list(enumerate(starts))
    while coming or link.bytes:
        if coming and coming[0][1][0] <= link.next:
            i, (at, size) = coming.pop(0)
            link.start(str(i), size, at, 1.0)
            continue
        now = link.next
        for what, name in link.reached(now, sizes):
            if what == "end":
                ends[int(name)] = now
    assert [ends[i] for i in range(len(starts))] == pytest.approx(exact(starts), abs=1e-5)


def test_marks_come_in_order() -> None:
    link = SharedLink(Transfer(0.0, 100.0))
    link.start("a", 100, 0.0, 0.3)
    assert link.next == pytest.approx(0.3)
    assert link.reached(0.3, {"a": 100}) == [("ready", "a")]
    assert (link.bytes, link.next) == (100, pytest.approx(1.0))
    assert link.reached(1.0, {"a": 100}) == [("end", "a")]
    assert (link.bytes, link.next) == (0, float("inf"))
