"""Usage counters and their cost."""

from __future__ import annotations

import msgspec

from gateway.prices import Prices

MILLION = 1e6
HOUR_S = 3600.0


class UsageCounts(msgspec.Struct, omit_defaults=True):
    """Sums over calls, and over the time for which nodes keep adapters in memory."""

    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens, as in the replies' `usage`: a prompt with several choices counts once."""
    completion_tokens: int = 0
    cold_starts: int = 0
    device_seconds: float = 0.0
    """Device time of the calls in seconds: their shares of the forward passes that computed them."""
    device_gb_seconds: float = 0.0
    """GB-seconds (10^9 bytes for a second) of adapters on devices, without provisioned copies."""
    host_gb_seconds: float = 0.0
    device_pinned_gb_seconds: float = 0.0
    host_pinned_gb_seconds: float = 0.0

    def add(self, counts: UsageCounts) -> None:
        self.requests += counts.requests
        self.prompt_tokens += counts.prompt_tokens
        self.completion_tokens += counts.completion_tokens
        self.cold_starts += counts.cold_starts
        self.device_seconds += counts.device_seconds
        self.device_gb_seconds += counts.device_gb_seconds
        self.host_gb_seconds += counts.host_gb_seconds
        self.device_pinned_gb_seconds += counts.device_pinned_gb_seconds
        self.host_pinned_gb_seconds += counts.host_pinned_gb_seconds

    def maximum(self, counts: UsageCounts) -> UsageCounts:
        return UsageCounts(*map(max, msgspec.structs.astuple(self), msgspec.structs.astuple(counts)))


Functions = dict[str, dict[str, UsageCounts]]
"""Counts by function and version; the base model has the version `base`."""
BASE = "base"


def add_to(functions: Functions, function: str, version: str, counts: UsageCounts) -> None:
    functions.setdefault(function, {}).setdefault(version, UsageCounts()).add(counts)


def cost_of(counts: UsageCounts, prices: Prices) -> float:
    """Returns the cost by these prices, rounded to millionths."""
    gb_seconds = (
        counts.device_gb_seconds
        + counts.host_gb_seconds
        + counts.device_pinned_gb_seconds
        + counts.host_pinned_gb_seconds
    )
    cost = counts.prompt_tokens / MILLION * prices.input_tokens_1m
    cost += counts.completion_tokens / MILLION * prices.output_tokens_1m
    cost += counts.device_seconds * prices.device_second
    return round(cost + gb_seconds / HOUR_S * prices.adapter_gb_hour, 6)
