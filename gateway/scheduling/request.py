"""The request as a policy sees it."""

from __future__ import annotations

import msgspec

from cluster.node_table import Demand


class PlacementRequest(msgspec.Struct, frozen=True):
    """Times are in seconds."""

    id: str
    demand: Demand
    """Demand of its place on a node."""
    digest: str | None
    """Adapter version; None for the base alone."""
    adapter_bytes: int
    """in its file, where an element has `adapter_itemsize` of them"""
    expected_tokens: float = 0.0
    """that the answer will have, as learnt of its function; 0: not known, then half of `max_tokens` counts"""
    expected_inverse: float = 0.0
    """the mean of 1 / tokens of such answers: what a second before the first token adds to the time per token; 0: not
    known, then 1 / `answer_tokens`"""
    typical_tokens: float = 0.0
    """of the answers that others get here; 0: not known, then as this one's"""
    ttft: float | None = None
    """that the caller was promised; None: nothing"""
    adapter_itemsize: int = 0
    """0: not known, then nodes hold an adapter as its file does"""

    @property
    def answer_tokens(self) -> float:
        """Returns the answer's tokens to reckon with: those expected, else half of `max_tokens`; at least 1."""
        return max(1.0, self.expected_tokens or self.demand.max_tokens / 2)

    @property
    def inverse_tokens(self) -> float:
        """The same of `expected_inverse`."""
        return self.expected_inverse or 1.0 / self.answer_tokens
