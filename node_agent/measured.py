"""Messages that a measuring process writes to standard output, one JSON object per line: each step when it begins, then
the results."""

from __future__ import annotations

import msgspec

from cluster.performance_file import PerformanceProfile


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Message at the beginning or during a step."""

    text: str
    share: float | None = None
    """finished share of the step, 0 to 1"""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Message that ends a failed measurement."""

    message: str


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Message with the results."""

    cold_start: msgspec.Struct | None
    """A node_agent.coldstart.profile.Profile; None: the engine has no layer-wise cold starts."""
    performance: PerformanceProfile
