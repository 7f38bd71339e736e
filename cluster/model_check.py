"""Checks of the performance model that a node published."""

from __future__ import annotations

import math

import msgspec

from cluster.performance_model import PerformanceModel

MAX_SECONDS = 1e6
"""Maximum coefficient or latency, in seconds: larger values can't be measurements. The limit keeps sums of products
finite."""
MIN_BANDWIDTH = 1.0
"""Minimum bandwidth of a transfer, in bytes per second."""

OFF = 1.3
"""Ratio of observed to forecast time above which a model counts as far off. A ratio below 1 / OFF is far off too."""


def is_off(ratio: float | None) -> bool:
    """Returns whether a node's performance model is far off. `ratio` is the node's `forecast_ratio`. None, the value
    before the first measured pass, is not far off."""
    return ratio is not None and not 1.0 / OFF <= ratio <= OFF


def problem_of(model: PerformanceModel, base: str = "") -> str | None:
    """Returns the problem of the model, with the name of the field; None if it has none. `base`: fingerprint of the
    base that the node serves; empty: not known yet.

    A NaN would make every comparison false. A negative coefficient would make a crowded node look the cheapest. A
    bandwidth of 0 would make a load infinite.
    """
    for part in ("decode", "prefill", "to_device", "from_store"):
        for field, value in msgspec.structs.asdict(getattr(model, part)).items():
            if field == "bandwidth":
                if not MIN_BANDWIDTH <= value < math.inf:
                    return f"{part}.{field} is {value}, not a finite number of {MIN_BANDWIDTH:g} byte/s or more"
            elif isinstance(value, (int, float)) and not 0.0 <= value <= MAX_SECONDS:
                return f"{part}.{field} is {value}, not between 0 and {MAX_SECONDS:g}"
    if not 0.0 <= model.exposed_share <= 1.0:
        return f"exposed_share is {model.exposed_share}, not between 0 and 1"
    if model.decode.seconds(1, 0, 0) <= 0.0:
        return "decode.base and decode.per_row, or its flat_rows, leave a step no time"
    if base and model.key.base not in ("", base):
        return f"key.base is {model.key.base[:16]}, and the node serves {base[:16]}"
    return None
