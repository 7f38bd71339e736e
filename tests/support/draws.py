"""How many examples hypothesis draws of a test: ten at most in `make test`, hundreds in `make test-long`."""

from __future__ import annotations

import os

WANTED = "GARNISH_TEST_DRAWS"
MANY, FEW = (os.environ.get(WANTED) == name for name in ("many", "few"))
USUAL = 10
"""Of a test that says nothing else, and the most that any test draws unless many are asked for."""
TIMES = 20
"""As many, when many are asked for."""
PART = 5
"""So many times fewer, where a few are enough: the same tests run elsewhere with all of theirs."""


def draws(few: int) -> int:
    """Returns how many examples a test draws that would draw `few` in `make test`."""
    return few * TIMES if MANY else max(1, few // PART) if FEW else min(few, USUAL)
