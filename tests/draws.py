"""How many examples hypothesis draws of a test: few in `make test`, many in `make test-long`."""

from __future__ import annotations

import os

WANTED = "GARNISH_TEST_DRAWS"
MANY, FEW = (os.environ.get(WANTED) == name for name in ("many", "few"))
USUAL = 25
"""Of a test that says nothing else."""
TIMES = 12
"""As many, when many are asked for."""
PART = 5
"""So many times fewer, where a few are enough: the same tests run elsewhere with all of theirs."""


def draws(few: int) -> int:
    """Returns how many a test draws that takes long for each: `few`, or the same number of times more, or less, as all
    others."""
    return few * TIMES if MANY else max(1, few // PART) if FEW else few
