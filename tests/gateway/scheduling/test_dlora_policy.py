"""The moves of dLoRA's policy, over drawn loads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.dlora import MIN_GAP, RUNNING_GAP, Dlora, MovableRequest

REQUESTS = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 500)), max_size=40)
UNMOVABLE = st.lists(st.integers(0, 12), min_size=1, max_size=5)
"""Requests on each node that may not be moved."""


@given(UNMOVABLE, REQUESTS)
def test_moves_even_out_what_they_may(unmovable: list[int], drawn: list[tuple[int, bool, int]]) -> None:
    requests = [
        MovableRequest(str(number), row, runs, tokens)
        for number, (row, runs, tokens) in enumerate(drawn)
        if row < len(unmovable)
    ]
    loads = {row: count + sum(request.row == row for request in requests) for row, count in enumerate(unmovable)}
    left, by_id, before = list(requests), {request.id: request for request in requests}, dict(loads)
    moves = Dlora().moves(loads, requests)
    assert loads == before
    for move in moves:
        request, gap = by_id[move.id], before[by_id[move.id].row] - before[move.row]
        assert before[request.row] == max(before.values()) and before[move.row] == min(before.values())
        here = [other for other in left if other.row == request.row]
        if request.runs:
            assert gap >= RUNNING_GAP and all(other.runs and other.tokens >= request.tokens for other in here)
        else:
            assert gap >= MIN_GAP and not any(not other.runs for other in here[here.index(request) + 1 :])
        left.remove(request)
        before[request.row] -= 1
        before[move.row] += 1
    most = max(before, key=before.__getitem__)
    stays = [request for request in left if request.row == most]
    gap = before[most] - min(before.values())
    if len(moves) < len(loads):  # nothing more was to be moved
        assert gap < MIN_GAP or not stays or (gap < RUNNING_GAP and all(request.runs for request in stays))


def test_a_node_that_serves_no_longer_gives_nothing_and_gets_nothing() -> None:
    requests = [MovableRequest("a", 7, runs=False, tokens=10)]
    assert Dlora().moves({0: 0.0, 1: 5.0}, requests) == []
