"""A request in a trace, and a request on its way through the simulated nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from garnish.simulation.memory import Entry

USUAL_TTFT = 10.0
"""TTFT target in seconds for a request without a TTFT SLO, equal to that of `node_agent/engine/request.py`."""
Outcome = Literal["", "done", "rejected"]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    at: float
    function: str
    """opaque name; empty for the base model"""
    rank: int
    prompt_tokens: int
    output_tokens: int
    """actual number of output tokens; the oracle is the only policy that knows this number"""
    tenant: str = ""
    bytes: int = 0
    """size of the adapter in bytes; 0 means that the size follows from the rank"""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the simulated nodes. Times are in simulated seconds, and 0 until known."""

    number: int
    at: float
    digest: str | None
    rank: int
    bytes: int
    prompt: int
    output: int
    max_tokens: int
    tenant: str = ""
    function: str = ""
    weight: float = 1.0
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    node: int = -1
    arrival_tier: int = 0
    admitted: float = 0.0
    first_token: float = 0.0
    end: float = 0.0
    outcome: Outcome = ""
    moves: int = 0
    generated: int = 0
    remaining: int = 0
    """prompt tokens not computed yet; after a move they include tokens generated on the previous node"""
    kv: int = 0
    finish_step: int = 0
    charged: int = 0
    entry: Entry | None = field(default=None, repr=False)

    @property
    def first_token_deadline(self) -> float:
        """Returns the deadline of the first token in simulated seconds.

        It is the arrival plus the promised TTFT, or plus USUAL_TTFT if none is promised.
        """
        return self.at + (USUAL_TTFT if self.ttft_slo is None else self.ttft_slo)

    @property
    def ttft(self) -> float:
        return self.first_token - self.at

    @property
    def tpt(self) -> float:
        """Time per token in seconds: end-to-end latency / output tokens."""
        return (self.end - self.at) / self.output

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in seconds.

        It is (end-to-end latency - TTFT) / (output tokens - 1), or 0 for a single token.
        """
        return (self.end - self.first_token) / (self.output - 1) if self.output > 1 else 0.0
