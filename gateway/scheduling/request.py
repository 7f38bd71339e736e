"""The request as a policy sees it."""

from __future__ import annotations

import msgspec

from cluster.node_table import Demand


class RoutingRequest(msgspec.Struct, frozen=True):
    """Request to be routed, as policies see it. Times are in seconds."""

    id: str
    demand: Demand
    digest: str | None
    adapter_bytes: int
    expected_tokens: float = 0.0
    """Expected number of tokens in the answer, learned from the function's answers. The value 0 means unknown; then
    half of `max_tokens` is used."""
    expected_inverse: float = 0.0
    """Expected value of 1 / (tokens in the answer), which is the weight of TTFT in the time per token. The value 0
    means unknown; then 1 / `answer_tokens` is used."""
    typical_tokens: float = 0.0
    """Mean number of tokens in all answers on this gateway. The value 0 means unknown; then `answer_tokens` is used."""
    ttft: float | None = None
    adapter_itemsize: int = 0
    """Bytes per element in the adapter's file. The value 0 means unknown; then the adapter is assumed to have its
    file's size on nodes."""

    @property
    def answer_tokens(self) -> float:
        """Returns the number of answer tokens to assume: the expected ones, else half of `max_tokens`; at least 1."""
        return max(1.0, self.expected_tokens or self.demand.max_tokens / 2)

    @property
    def inverse_tokens(self) -> float:
        """Returns the value of 1 / tokens to assume: the expected one, else 1 / `answer_tokens`."""
        return self.expected_inverse or 1.0 / self.answer_tokens
