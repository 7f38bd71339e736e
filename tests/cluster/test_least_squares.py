"""Least squares without negative coefficients, against a solver that tries every set of columns."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.least_squares import nonnegative


def best_of_all_sets(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The solution is the plain one over some set of columns: the best of those that are not negative."""
    count = columns.shape[1]
    best, least = np.zeros(count), float(np.linalg.norm(target))
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            found = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            left = float(np.linalg.norm(columns[:, chosen] @ found - target))
            if (found >= 0).all() and left < least:
                best, least = np.zeros(count), left
                best[list(chosen)] = found
    return best


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 30), st.floats(-3, 3), st.integers(-9, 9))
def test_as_good_as_the_best_of_all_sets(seed: int, count: int, rows: int, shift: float, magnitude: int) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.normal(shift, 1.0, (rows, count)) * 10.0 ** rng.integers(-3, 3, count)
    target = rng.normal(shift, 1.0, rows) * 10.0**magnitude
    found = nonnegative(columns, target)
    assert (found >= 0).all()
    left = np.linalg.norm(columns @ found - target)
    best = np.linalg.norm(columns @ best_of_all_sets(columns, target) - target)
    assert left <= best + 1e-9 * np.linalg.norm(target)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_what_made_the_target_is_found(coefficients: list[float], seed: int) -> None:
    wanted = np.array(coefficients)
    columns = np.random.default_rng(seed).uniform(0.5, 2.0, (20, len(wanted)))
    assert nonnegative(columns, columns @ wanted) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_columns_of_nothing_and_columns_that_say_the_same() -> None:
    columns = np.array([[1.0, 0.0, 1.0], [2.0, 0.0, 2.0], [4.0, 0.0, 4.0]])
    found = nonnegative(columns, np.array([3.0, 6.0, 12.0]))
    assert columns @ found == pytest.approx([3.0, 6.0, 12.0])
    assert found[1] == 0
    assert nonnegative(columns, np.zeros(3)).tolist() == [0, 0, 0]
    assert nonnegative(columns, -np.ones(3)).tolist() == [0, 0, 0]
