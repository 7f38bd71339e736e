"""What usage costs, by the operator's prices: numbers without a currency."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.usage.counts import UsageCounts

Price = Annotated[float, Meta(ge=0, le=1e9)]
MILLION = 1e6
HOUR = 3600.0


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out costs nothing."""

    input_tokens_1m: Price = 0.0
    """A million tokens of prompts."""
    output_tokens_1m: Price = 0.0
    device_second: Price = 0.0
    adapter_gb_hour: Price = 0.0
    """A GB of an adapter for an hour in a node's memory, device or host, pinned or not."""


def cost_of(counts: UsageCounts, prices: Prices) -> float:
    """Returns the cost, rounded to millionths."""
    gb_seconds = (
        counts.device_gb_seconds
        + counts.host_gb_seconds
        + counts.device_pinned_gb_seconds
        + counts.host_pinned_gb_seconds
    )
    cost = counts.prompt_tokens / MILLION * prices.input_tokens_1m
    cost += counts.completion_tokens / MILLION * prices.output_tokens_1m
    cost += counts.device_seconds * prices.device_second
    return round(cost + gb_seconds / HOUR * prices.adapter_gb_hour, 6)
