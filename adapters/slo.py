"""Service level objectives (SLOs) of a tenant's calls, and the type of a tenant's weight."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]
Weight = Annotated[float, Meta(ge=0.001, le=1000)]
SloClass = Literal["strict", "standard", "best_effort"]
CLASSES: tuple[SloClass, ...] = ("best_effort", "standard", "strict")
"""SLO classes, lowest first."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"slo_class": "class"}):
    """Service level objective (SLO) of a tenant's calls. A time that is None is not promised."""

    ttft_ms: Milliseconds | None = None
    """Promised time from receipt to the first token."""
    tpot_ms: Milliseconds | None = None
    """Promised time between two tokens, averaged over a call."""
    attain: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """Fraction of calls that should meet the promised times."""
    slo_class: SloClass = "standard"


def lower_class(first: SloClass, second: SloClass) -> SloClass:
    """Returns the lower of two SLO classes."""
    return min(first, second, key=CLASSES.index)
