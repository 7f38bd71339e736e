"""What a policy that weighs nodes against each other made of them."""

from __future__ import annotations

import msgspec
import numpy as np

from gateway.scheduling.cost import Terms


class Scores(msgspec.Struct, gc=False):
    """Of one choice; columns as in Terms, by candidate."""

    terms: Terms
    totals: np.ndarray
    """The least wins; infinite where a promise would be broken."""
    spreading: np.ndarray | None = None
    """Seconds charged for one more copy of the adapter, as if the first token waited for them. None: nowhere any."""
    retry_after: float = 0.0
    """Seconds until a refused request may find a place, as forecast."""


class ScoringPolicy:
    """A policy that can tell afterwards why it chose."""

    last: Scores | None = None
    """Of the latest choice: it is to be read before anything else can run."""
