"""How many nodes an adapter may have, by a clock of the tests' own."""

from __future__ import annotations

from itertools import pairwise

from gateway.scheduling.spreading import FILL, HOLD, WINDOW, Spreading

ROWS = 16


class Demand:
    """Calls `rate` times a second, each for a second in a row, over `nodes` in turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self.spreading = Spreading(lambda: self.now)

    def run(self, seconds: float, rate: float, nodes: int = 1) -> list[int]:
        """`wanted` after each call."""
        told = []
        end = self.now + seconds
        while self.now < end:
            self.now += 1 / rate
            self.count += 1
            self.spreading.note("d", f"n{self.count % nodes}", str(self.count), 1.0, ROWS)
            told.append(self.spreading.wanted("d"))
        return told


def test_homes_follow_demand() -> None:
    demand = Demand()
    assert set(demand.run(2 * WINDOW, rate=1.0)) == {1}
    assert demand.spreading.homes("d") == {"n0"}
    busy = demand.run(5 * WINDOW, rate=3 * FILL * ROWS - 2, nodes=8)  # of three nodes nearly all
    assert max(busy) == busy[-1] == 3
    assert len(demand.spreading.homes("d")) == 3
    calm = demand.run(10 * WINDOW, rate=1.0)
    assert calm[-1] == 1
    assert len(demand.spreading.homes("d")) == 1


def test_a_demand_on_the_edge_does_not_swing() -> None:
    demand = Demand()
    demand.run(5 * WINDOW, rate=2 * FILL * ROWS)
    told = []
    for _ in range(20):
        told += demand.run(WINDOW / 3, rate=2.1 * FILL * ROWS)
        told += demand.run(WINDOW / 3, rate=1.9 * FILL * ROWS)
    assert sum(a != b for a, b in pairwise(told)) <= 1


def test_homes_are_given_up_one_by_one() -> None:
    demand = Demand()
    demand.run(5 * WINDOW, rate=8 * FILL * ROWS)
    start = demand.spreading.wanted("d")
    told = demand.run(10 * WINDOW, rate=1.0)
    assert start > 5 and told[-1] == 1
    assert all(a - b in (0, 1) for a, b in zip([start, *told], told, strict=False))
    assert told.index(1) >= HOLD * (start - 2)  # a call a second


def test_the_newest_home_displaces_the_one_longest_without_a_call() -> None:
    now = 0.0
    spreading = Spreading(lambda: now)
    spreading.note("d", "a", "1", 0.1, ROWS)
    assert spreading.homes("d") == {"a"}
    spreading.note("d", "b", "2", 0.1, ROWS)
    assert spreading.homes("d") == {"b"}
    spreading.forget("d", "b")
    assert not spreading.homes("d")
    spreading.forget("unknown", "b")


def test_a_placement_that_is_tried_again_is_the_same_work() -> None:
    now = 0.0
    once, again = Spreading(lambda: now), Spreading(lambda: now)
    for index in range(100):
        once.note("d", "a", str(index), 3.0, ROWS)
        for _ in range(4):
            again.note("d", "a", str(index), 3.0, ROWS)
    assert once.wanted("d") == again.wanted("d") > 1


def test_several_gateways_see_a_part_each() -> None:
    now = 0.0
    one, two = Spreading(lambda: now), Spreading(lambda: now, gateways=lambda: 2)
    for index in range(200):
        one.note("d", "a", str(index), 3.0, ROWS)
        if index % 2:
            two.note("d", "a", str(index), 3.0, ROWS)
    assert one.wanted("d") == two.wanted("d") > 1


def test_a_node_that_does_not_tell_its_rows_counts_all_the_same() -> None:
    now = 0.0
    spreading = Spreading(lambda: now)
    for index in range(200):
        spreading.note("d", "a", str(index), 3.0, 0)
    assert spreading.wanted("d") > 1


def test_adapters_are_forgotten() -> None:
    spreading = Spreading(lambda: 0.0, max_adapters=2)
    for digest in ("a", "b", "a", "c"):
        spreading.note(digest, "n", digest, 1.0, ROWS)
    assert [bool(spreading.homes(digest)) for digest in "abc"] == [True, False, True]
