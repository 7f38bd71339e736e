"""Least squares with non-negative coefficients."""

from __future__ import annotations

import numpy as np

PATIENCE = 30
"""Maximum number of rounds per column; normally a few are enough."""


def nonnegative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the x f64[k] >= 0 that minimises |columns x - target|. `columns` is f64[n, k], `target` f64[n], all
    finite.

    The method is Lawson and Hanson's active set (Solving Least Squares Problems, 1974, chapter 23) on columns scaled to
    equal length. With linearly dependent columns it returns one of the solutions. Raises ValueError when it does not
    converge.
    """
    lengths = np.linalg.norm(columns, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    unit = columns / scale
    count = unit.shape[1]
    x, free, barred = np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)
    threshold = 1e-12 * float(np.linalg.norm(target))
    for _ in range(PATIENCE * count):
        pull = np.where(free | barred, -np.inf, unit.T @ (target - unit @ x))
        enters = int(np.argmax(pull))
        if not pull[enters] > threshold:
            return np.asarray(x / scale)
        free[enters] = True
        x = _solve(unit, target, x, free)
        # A column that leaves at once entered only by rounding. It stays out until another one has moved x.
        barred = barred | (np.arange(count) == enters) if not free[enters] else np.zeros(count, bool)
    raise ValueError(f"least squares of {columns.shape} did not converge")


def _solve(columns: np.ndarray, target: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Returns x, moved towards the solution over the free columns. Columns that would become negative stop at 0. They
    are removed from `free`, which is changed in place."""
    while free.any():
        solution = np.zeros_like(x)
        solution[free] = np.linalg.lstsq(columns[:, free], target, rcond=None)[0]
        below = free & (solution <= 0)
        if not below.any():
            return solution
        steps = np.where(below, x / np.where(below & (x > 0), x - solution, 1.0), np.inf)
        first = int(np.argmin(steps))
        x = x + float(steps[first]) * (solution - x)
        x[first] = 0.0
        free[first] = False
        x[~free] = 0.0
    return np.zeros_like(x)
