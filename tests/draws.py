"""How many examples hypothesis draws of a test: few in `make test`, many in `make test-long`."""

from __future__ import annotations

import os

MANY = os.environ.get("GARNISH_TEST_DRAWS") == "many"
USUAL = 25
"""Of a test that says nothing else."""
TIMES = 12
"""As many, when many are asked for."""


def draws(few: int) -> int:
    """Returns how many a test draws that takes long for each: `few`, or the same number of times more as all others."""
    return few * TIMES if MANY else few
