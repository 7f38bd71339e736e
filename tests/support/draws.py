"""How many examples hypothesis draws of a test: ten at most in `make test`, hundreds in `make test-long`."""

from __future__ import annotations

import os

WANTED = "GARNISH_TEST_DRAWS"
MANY, FEW = (os.environ.get(WANTED) == name for name in ("many", "few"))
USUAL = 10
"""Examples of a test that names no number, and the maximum of any test in `make test`."""
TIMES = 20
"""Factor by which `make test-long` draws more."""
PART = 5
"""Divisor where few examples are enough, because the same tests run elsewhere with all of theirs."""


def draws(few: int) -> int:
    """Returns how many examples a test draws that would draw `few` in `make test`."""
    return few * TIMES if MANY else max(1, few // PART) if FEW else min(few, USUAL)
