"""Service level objectives of a tenant's calls, and the tenant's weight."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]
Weight = Annotated[float, Meta(ge=0.001, le=1000)]
SloClass = Literal["strict", "standard", "best_effort"]
CLASSES: tuple[SloClass, ...] = ("best_effort", "standard", "strict")
"""The lowest first."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"slo_class": "class"}):
    """Service level objective of a tenant's calls. None: nothing is promised."""

    ttft_ms: Milliseconds | None = None
    """Time from receipt to the first token."""
    tpot_ms: Milliseconds | None = None
    """Time between two tokens, on average over a call."""
    attain: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """The share of calls for which this is meant to hold."""
    slo_class: SloClass = "standard"


def lower_class(first: SloClass, second: SloClass) -> SloClass:
    """Returns the one of two SLO classes that is promised less."""
    return min(first, second, key=CLASSES.index)
