"""What came of prefetches, against the formula written down by hand; and how prefetching backs off and recovers."""

from __future__ import annotations

import random

import pytest

from node_agent.engine.prefetch_record import HALF_LIFE_S, HELD_BACK_CHANCE, MAX_AT_ONCE, Bounds, PrefetchRecord

MB = 1_000_000


@pytest.mark.parametrize("seed", range(10))
def test_sums_and_shares_are_those_of_the_formula(seed: int) -> None:
    """Each byte's weight is 0.5 ** (age / half-life); the leeway counts as of use, and does not fade."""
    rng = random.Random(seed)
    leeway, bound = rng.choice([0, MB, 20 * MB]), rng.choice([0.0, 0.25, 0.6])
    record, noted, now = PrefetchRecord(bound, leeway), list[tuple[float, float, float, float]](), 1000.0
    for _ in range(60):
        now += rng.choice([0.0, 0.1, 5.0, 400.0]) * rng.random()
        useful, late, wasted = (rng.choice([0, rng.randrange(5 * MB)]) for _ in range(3))
        record.count_bytes(now, useful=useful, late=late, wasted=wasted)
        noted.append((now, useful, late, wasted))
        asked = now + rng.choice([0.0, 30.0])
        weights = [0.5 ** ((asked - at) / HALF_LIFE_S) for at, *_ in noted]
        total = sum(w * sum(bytes_) for w, (_, *bytes_) in zip(weights, noted, strict=True))
        share = sum(w * wasted for w, (*_, wasted) in zip(weights, noted, strict=True)) / max(1.0, total + leeway)
        now = asked
        assert record.wasted_share(asked) == pytest.approx(share, abs=1e-9)
        if share <= bound:
            expected = Bounds(MAX_AT_ONCE, 0.0)
        else:
            least = HELD_BACK_CHANCE + (1 - HELD_BACK_CHANCE) * (share - bound) / (1 - bound)
            expected = Bounds(1, pytest.approx(least))  # type: ignore[arg-type]
        assert record.bounds(asked) == expected
    assert (record.useful_bytes, record.late_bytes, record.wasted_bytes) == tuple(
        sum(entry[i] for entry in noted) for i in (1, 2, 3)
    )


def test_a_first_mistake_changes_nothing() -> None:
    record = PrefetchRecord(0.25, 30 * MB)
    record.count_bytes(0.0, wasted=9 * MB)
    assert record.bounds(0.0) == Bounds()


def test_it_backs_off_further_the_more_is_wasted_and_recovers_by_itself() -> None:
    record, least = PrefetchRecord(0.25, 30 * MB), list[float]()
    for minute in range(5):
        record.count_bytes(60.0 * minute, wasted=30 * MB, useful=MB)
        least.append(record.bounds(60.0 * minute).min_chance)
    assert least == sorted(least) and least[0] > HELD_BACK_CHANCE and 0.7 < least[-1] < 1
    assert record.bounds(240.0 + 10 * HALF_LIFE_S) == Bounds()


def test_it_recovers_sooner_when_prefetches_are_of_use() -> None:
    record = PrefetchRecord(0.25, 30 * MB)
    record.count_bytes(0.0, wasted=60 * MB)
    assert record.bounds(0.0).at_once == 1
    record.count_bytes(1.0, useful=200 * MB)
    assert record.bounds(1.0) == Bounds()


def test_a_bound_of_one_never_holds_back_and_one_of_zero_at_once() -> None:
    for bound, held_back in ((1.0, False), (0.0, True)):
        record = PrefetchRecord(bound, 0)
        record.count_bytes(0.0, wasted=MB)
        assert (record.bounds(0.0).at_once == 1) == held_back
