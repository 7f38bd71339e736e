"""The counters, and the objects of the registry that hold them."""

from __future__ import annotations

import msgspec


class UsageCounts(msgspec.Struct):
    """Sums over calls."""

    requests: int = 0
    prompt_tokens: int = 0
    """As in the replies' `usage`: the prompt of a call with several choices counts once."""
    completion_tokens: int = 0
    cold_starts: int = 0
    """Calls whose adapter was not on the device when they reached the node."""

    def add(self, other: UsageCounts) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cold_starts += other.cold_starts

    def maximum(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts(
            max(self.requests, other.requests),
            max(self.prompt_tokens, other.prompt_tokens),
            max(self.completion_tokens, other.completion_tokens),
            max(self.cold_starts, other.cold_starts),
        )


Functions = dict[str, dict[str, UsageCounts]]
"""By function and version; the base model has the version `base`."""
BASE = "base"


def add_to(functions: Functions, function: str, version: str, counts: UsageCounts) -> None:
    functions.setdefault(function, {}).setdefault(version, UsageCounts()).add(counts)
